"""A rank that a driver starts as a process: its configuration, as JSON, is its one argument. It ends with standard input."""

from __future__ import annotations

import logging

import click
import msgspec

from disagg.bench.rank import RankConfig
from disagg.cli.errors import one_sentence
from disagg.cli.rank import serve_until_told


@click.command()
@click.argument("config")
@one_sentence
def child(*, config: str) -> None:
    """Serve one rank."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    serve_until_told(msgspec.json.decode(config, type=RankConfig), until_stdin_ends=True)


if __name__ == "__main__":
    child(prog_name="rank")
