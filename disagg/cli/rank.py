"""`disagg prefill` and `disagg decode`: one rank each, as a server would embed it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from disagg.bench.rank import RankConfig
from disagg.bench.serve import serve
from disagg.bench.sides import Side
from disagg.channel import KeyPair
from disagg.cli.errors import one_sentence
from disagg.errors import ConfigError

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
The same from a file, which has the options' names and a table of peers:
  disagg prefill --config rank1.toml
\b
      model = "tiny"
      side = "tp=2"
      rank = 1
      leader = "tcp://127.0.0.1:7100"
      [peers]
      decode = "tcp://127.0.0.1:7200"
"""


def read_config(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """Options from a TOML file; raises `ConfigError` naming the file and what is wrong in it."""
    try:
        found = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: {error}") from error
    options: dict[str, Any] = {}
    for key, value in found.items():
        if key in ("peers", "peer_keys") and isinstance(value, dict):
            options[key] = [f"{name}={text}" for name, text in value.items()]
        elif key in known and not isinstance(value, dict):
            options[key] = value
        else:
            raise ConfigError(
                f"config {path}: expected keys of {', '.join(known)}, and tables peers and peer_keys, found {key!r}"
            )
    return options


def _use_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Take a file's options as defaults; those on the command line go before."""
    if path is None:
        return
    known = [p.name for p in context.command.params if p.name and p.name != parameter.name]
    try:
        context.default_map = read_config(path, known)
    except (ConfigError, OSError) as error:
        print(f"{context.command_path}: {error}", file=sys.stderr)
        context.exit(2)


def pairs(texts: Sequence[str], *, what: str) -> dict[str, str]:
    """`NAME=VALUE` each; raises `ConfigError` quoting what is none, or names one twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in found:
            raise ConfigError(f"{what}: expected NAME=VALUE, each name once, found {text!r}")
        found[name] = value
    return found


def read_keys(path: str | None) -> KeyPair | None:
    """The key pair of a TOML file with `public` and `secret`; raises `ConfigError` naming the file."""
    if path is None:
        return None
    try:
        found = tomllib.loads(Path(path).read_text())
        return KeyPair(found["public"], found["secret"])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"keys {path}: expected a TOML file with public and secret: {type(error).__name__}: {error}"
        ) from error


OPTIONS = (
    click.option("--config", type=click.Path(dir_okay=False, path_type=Path), callback=_use_config, is_eager=True,
                 expose_value=False, help="Options from a TOML file."),
    click.option("--model", required=True, help="A preset, or the path of a config.json."),
    click.option("--side", default="tp=1", help="The whole instance, such as tp=4,pp=2,page=16."),
    click.option("--rank", type=click.IntRange(0), default=0, help="Which of its ranks this is."),
    click.option("--name", help="The instance's name; by default the subcommand's."),
    click.option("--listen", default="tcp://127.0.0.1:0", help="Control address; port 0: any."),
    click.option("--advertise", metavar="ADDRESS", help="Where peers reach this rank, if it listens on every interface."),
    click.option("--leader", help="Control address of rank 0, on every other rank."),
    click.option("--peer", "peers", multiple=True, metavar="NAME=ADDRESS", help="A peer instance's rank 0."),
    click.option("--peer-key", "peer_keys", multiple=True, metavar="NAME=KEY", help="A peer instance's public key."),
    click.option("--keys", metavar="FILE", help="TOML file with this instance's public and secret key."),
    click.option("--backend", default="auto", help="Engine: auto, nixl, mooncake, local, or a third party's."),
    click.option("--transport", default="auto", help="What it may use: auto, rdma, tcp or shm."),
    click.option("--device-nic", "devices", multiple=True, metavar="NIC", help="A NIC that it may use; any, if not given."),
    click.option("--require", help="The transport that must be in use."),
    click.option("--insecure", is_flag=True, help="Allow a control address off loopback without keys."),
    click.option("--trusted-network", is_flag=True, help="Allow an engine that moves bytes over open TCP off loopback."),
    click.option("--driver", metavar="ADDRESS", help="Take a benchmark's commands at this address."),
    click.option("--pages", type=click.IntRange(1), default=256, help="Pages of the pools."),
    click.option("--layers", type=click.IntRange(1), help="Keep only the model's first layers."),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where the pools are."),
    click.option("--verify", type=click.Choice(["off", "sample", "full"]), default="off", help="The library's own sums."),
    click.option("--until-stdin-ends", is_flag=True, hidden=True, help="End with standard input: with whoever started it."),
    click.option("--debug", is_flag=True, help="Log what happens, and show tracebacks."),
)  # fmt: skip


def _rank_command(role: str) -> click.Command:
    """The subcommand of one role; they differ in the name alone."""

    @one_sentence
    def run(**given: Any) -> None:
        serve_until_told(configure(role, given), until_stdin_ends=given["until_stdin_ends"])

    def logged(*, debug: bool, **given: Any) -> None:
        logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        run(debug=debug, **given)

    command: Callable[..., None] = logged
    for option in reversed(OPTIONS):
        command = option(command)
    return click.command(
        role,
        epilog=EPILOG,
        context_settings={"show_default": True},
        help=f"Start one {role} rank, with pools of its own, and keep it up until SIGTERM or SIGINT.",
    )(command)


def configure(role: str, given: dict[str, Any]) -> RankConfig:
    """The rank that the options describe. Raises `ConfigError`."""
    return RankConfig(
        role=role,
        name=given["name"] or role,
        model=given["model"],
        side=Side.parse(given["side"]),
        rank=given["rank"],
        num_layers=given["layers"],
        num_pages=given["pages"],
        listen=given["listen"],
        advertise=given["advertise"],
        leader=given["leader"],
        peers=pairs(given["peers"], what="peer"),
        peer_keys=pairs(given["peer_keys"], what="peer-key"),
        keys=read_keys(given["keys"]),
        backend=given["backend"],
        transport=given["transport"],
        devices=tuple(given["devices"]),
        require=given["require"],
        insecure=given["insecure"],
        trusted_network=given["trusted_network"],
        driver=given["driver"],
        device=given["device"],
        verify=given["verify"],
    )


def serve_until_told(config: RankConfig, *, until_stdin_ends: bool) -> None:
    """Keep a rank up until SIGTERM or SIGINT, and close it cleanly."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, args=(stop,), name="disagg-stdin", daemon=True).start()
    serve(config, stop=stop)


def _end_with_stdin(stop: threading.Event) -> None:
    """Whoever started this process is gone, or wants it gone: close, and do not hang in it."""
    while os.read(0, 4096):
        pass
    stop.set()
    threading.Event().wait(END_S)
    os._exit(1)


prefill = _rank_command("prefill")
decode = _rank_command("decode")
