"""`disagg prefill` and `disagg decode`: one rank each, as a server would embed it."""

from __future__ import annotations

import logging
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
from disagg.commands.rank.serve import serve_together
from disagg.commands.shell.errors import one_sentence
from disagg.config import Setting, is_list, is_table, settings

END_S = 10.0
"""How long a rank whose standard input has ended may take to close."""

EPILOG = """\b
Examples, a decode instance of one rank and a prefill instance of two:
  disagg decode  --model tiny --side tp=1 --listen tcp://127.0.0.1:7200 \\
      --peer prefill=tcp://127.0.0.1:7100
  disagg prefill --model tiny --side tp=2 --rank 0 --listen tcp://127.0.0.1:7100 \\
      --peer decode=tcp://127.0.0.1:7200
  disagg prefill --model tiny --side tp=2 --rank 1 --leader tcp://127.0.0.1:7100 \\
      --peer decode=tcp://127.0.0.1:7200

\b
The same from a file; the documentation has a table of all keys:
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
    """The option of a setting. Texts are read by `RankConfig.load`, which knows what is expected."""
    if setting.base is bool:
        return click.option(setting.flag, setting.key, is_flag=True, default=None, help=setting.description)
    choices = typing.get_args(setting.base) if typing.get_origin(setting.base) is Literal else ()
    metavar = setting.extra.get("metavar") or "|".join(choices) or ("N" if setting.base is int else "TEXT")
    told = setting.description
    if setting.default not in (None, "", (), {}, msgspec.NODEFAULT) and not is_table(setting):
        told += f"  [default: {setting.default}]"
    many = is_list(setting) or is_table(setting)
    return click.option(setting.flag, setting.key, multiple=many, metavar=metavar, help=told)


OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with settings. Environment variables DISAGG_* go before it, and options before both.",
    ),
    *(_option(setting) for setting in settings(RankConfig) if setting.key != "role"),
    click.option("--until-stdin-ends", is_flag=True, hidden=True, help="End with standard input: with whoever started it."),
    click.option("--debug", is_flag=True, help="Log what happens, and show tracebacks."),
)


def _rank_command(role: str) -> click.Command:
    """The subcommand of one role; they differ in the name alone."""

    @one_sentence
    def run(*, config: Path | None, until_stdin_ends: bool, **given: Any) -> None:
        serve_until_told((configure(role, given, file=config, environ=os.environ),), until_stdin_ends=until_stdin_ends)

    def logged(*, debug: bool, **given: Any) -> None:
        logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        run(debug=debug, **given)

    command: Callable[..., None] = logged
    for option in reversed(OPTIONS):
        command = option(command)
    return click.command(
        role,
        epilog=EPILOG,
        context_settings={"max_content_width": 120},
        help=f"Start one {role} rank, with pools of its own, and keep it up until SIGTERM or SIGINT.",
    )(command)


def configure(role: str, given: Mapping[str, Any], *, file: Path | None, environ: Mapping[str, str]) -> RankConfig:
    """The rank that a file, the environment and the options describe. Raises `ConfigError`."""
    texts = {key: value for key, value in given.items() if isinstance(value, str) or (value and isinstance(value, tuple))}
    flags = {key: value for key, value in given.items() if value is True}
    return RankConfig.load(file=file, environ=environ, texts=texts, role=role, **flags)


def serve_until_told(configs: Sequence[RankConfig], *, until_stdin_ends: bool) -> None:
    """Keep ranks up until SIGTERM or SIGINT, and close them cleanly."""
    stop = threading.Event()
    # A handler runs in this thread, which may hold the event's own lock just then: it must not touch the event.
    told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(told, True)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_end_with_signal, args=(told, stop), name="disagg-signals", daemon=True).start()
    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, args=(stop,), name="disagg-stdin", daemon=True).start()
    serve_together(configs, stop=stop)


def _end_with_signal(told: int, stop: threading.Event) -> None:
    os.read(told, 1)
    stop.set()


def _end_with_stdin(stop: threading.Event) -> None:
    """Whoever started this process is gone, or wants it gone: close, and do not hang in it."""
    while os.read(0, 4096):
        pass
    stop.set()
    threading.Event().wait(END_S)
    os._exit(1)


prefill = _rank_command("prefill")
decode = _rank_command("decode")
