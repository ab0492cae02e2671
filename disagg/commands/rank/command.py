"""`disagg prefill` and `disagg decode`: one rank in a process."""

from __future__ import annotations

import os
import signal
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from disagg.commands.rank.rank import RankConfig
from disagg.commands.rank.serve import Stop, serve_together
from disagg.commands.shell.errors import one_sentence
from disagg.commands.shell.logs import configure_logging
from disagg.settings import Setting, is_list, is_table, settings

END_S = 10.0
"""How long a rank may take to close after its standard input ended."""

EPILOG = """\b
Examples, a decode instance of one rank and a prefill instance of two:
  disagg decode  --model tiny --side tp=1 --listen tcp://127.0.0.1:7200 \\
      --peer prefill=tcp://127.0.0.1:7100
  disagg prefill --model tiny --side tp=2 --rank 0 --listen tcp://127.0.0.1:7100 \\
      --peer decode=tcp://127.0.0.1:7200
  disagg prefill --model tiny --side tp=2 --rank 1 --leader tcp://127.0.0.1:7100 \\
      --peer decode=tcp://127.0.0.1:7200

\b
The same from a file; the documentation lists all keys:
  disagg prefill --config rank1.toml
\b
      model = "tiny"
      side = "tp=2"
      rank = 1
      leader = "tcp://127.0.0.1:7100"
      [peers]
      decode = "tcp://127.0.0.1:7200"
"""


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _option(setting: Setting) -> Decorator:
    """Its value stays text, which `RankConfig.load` parses."""
    if setting.base is bool:
        return click.option(setting.flag, setting.key, is_flag=True, default=None, help=setting.description)
    choices = typing.get_args(setting.base) if typing.get_origin(setting.base) is Literal else ()
    metavar = setting.extra.get("metavar") or "|".join(choices) or ("N" if setting.base is int else "TEXT")
    text = setting.description
    if setting.default not in (None, "", (), {}, msgspec.NODEFAULT) and not is_table(setting):
        text += f"  [default: {setting.default}]"
    many = is_list(setting) or is_table(setting)
    return click.option(setting.flag, setting.key, multiple=many, metavar=metavar, help=text)


OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with settings. Environment variables DISAGG_* override it, and options override both.",
    ),
    *(_option(setting) for setting in settings(RankConfig) if setting.key != "role"),
    click.option("--until-stdin-ends", is_flag=True, hidden=True, help="End when standard input ends."),
    click.option("--debug", is_flag=True, help="Show tracebacks, and log at level info."),
)


def _rank_command(role: str) -> click.Command:
    @one_sentence
    def run(*, config: Path | None, until_stdin_ends: bool, **given: Any) -> None:
        rank = configure(role, given, file=config, environ=os.environ)
        configure_logging(rank.log_level, rank.log_format)
        serve_until_stopped((rank,), until_stdin_ends=until_stdin_ends)

    def logged(*, debug: bool, log_level: str | None, **given: Any) -> None:
        form = given["log_format"] or os.environ.get("DISAGG_LOG_FORMAT")
        configure_logging("warning", "json" if form == "json" else "text")  # for warnings while the settings are read
        run(debug=debug, log_level=log_level or ("info" if debug else None), **given)

    command: Callable[..., None] = logged
    for option in reversed(OPTIONS):
        command = option(command)
    return click.command(
        role,
        epilog=EPILOG,
        context_settings={"max_content_width": 120},
        help=f"Run one {role} rank with its own pools. SIGTERM and SIGINT end it once its requests have ended.",
    )(command)


def configure(role: str, given: Mapping[str, Any], *, file: Path | None, environ: Mapping[str, str]) -> RankConfig:
    texts = {key: value for key, value in given.items() if isinstance(value, str) or (value and isinstance(value, tuple))}
    flags = {key: value for key, value in given.items() if value is True}
    return RankConfig.load(file=file, environ=environ, texts=texts, role=role, **flags)


def serve_until_stopped(configs: Sequence[RankConfig], *, until_stdin_ends: bool) -> None:
    stop = Stop()
    # A signal handler runs in this thread, which may hold the event's lock: it must not set the event itself.
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_end_with_signal, args=(reader, stop), name="disagg-signals", daemon=True).start()
    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, args=(stop,), name="disagg-stdin", daemon=True).start()
    serve_together(configs, stop=stop)


def _end_with_signal(reader: int, stop: Stop) -> None:
    """The first signal drains the ranks; another one ends them now."""
    stop.end(f"{signal.Signals(os.read(reader, 1)[0]).name} was received", drain=True)
    stop.end(f"{signal.Signals(os.read(reader, 1)[0]).name} was received while it drained", drain=False)


def _end_with_stdin(stop: Stop) -> None:
    """Exits by force if closing hangs."""
    while os.read(0, 4096):
        pass
    stop.end("standard input has ended", drain=False)
    threading.Event().wait(END_S)
    os._exit(1)


prefill = _rank_command("prefill")
decode = _rank_command("decode")
