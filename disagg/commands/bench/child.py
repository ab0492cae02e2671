"""The process of one or several ranks that a driver starts. It ends with its standard input, or with the last rank."""

from __future__ import annotations

import logging

import click
import msgspec

from disagg.commands.rank.command import serve_until_stopped
from disagg.commands.rank.rank import RankConfig
from disagg.commands.shell.errors import one_sentence


@click.command()
@click.argument("configs")
@one_sentence
def child(*, configs: str) -> None:
    """Run one rank, or several that share a GPU."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    serve_until_stopped(msgspec.json.decode(configs, type=tuple[RankConfig, ...]), until_stdin_ends=True)


if __name__ == "__main__":
    child(prog_name="rank")
