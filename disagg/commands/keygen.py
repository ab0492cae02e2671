"""`disagg keygen`: write a CURVE key pair for an instance to files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click

from disagg.commands.shell.errors import one_sentence
from disagg.core.errors import ConfigError
from disagg.runtime import keys
from disagg.runtime.keys import KeyPair

EPILOG = """\b
Examples:
  disagg keygen --out /etc/disagg                (writes disagg.toml and disagg.pub there)
  disagg keygen --out keys --name prefill
  disagg keygen --out keys --name decode
\b
Every rank of an instance uses the instance's pair and its peers' public keys:
  disagg prefill --keys keys/prefill.toml --peer decode=tcp://10.0.0.2:7100 \\
      --peer-key decode=file:keys/decode.pub ...
"""


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 120})
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=".", help="Folder to write to; created if missing."
)
@click.option("--name", default="disagg", help="Name of the files: NAME.toml with both keys, NAME.pub with the public key.")
@click.option("--hex", "hexadecimal", is_flag=True, help="Write 64 hexadecimal digits instead of 40 characters of Z85.")
@click.option("--force", is_flag=True, help="Replace existing files. Peers that use the old key can no longer connect.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@one_sentence
def keygen(*, out: Path, name: str, hexadecimal: bool, force: bool) -> None:
    """Generate a key pair for an instance and print its public key, which the peers need.

    NAME.toml holds the secret key; only its owner can read it (0600). Pass it to --keys on every rank of the instance.
    """
    print(write_pair(KeyPair.generate(), out, name=name, force=force, text=keys.hexadecimal if hexadecimal else str))


def write_pair(pair: KeyPair, folder: Path, *, name: str, force: bool, text: Callable[[str], str] = str) -> str:
    """Write `NAME.toml` (0600), which `--keys` reads, and `NAME.pub`; returns the public key. `text` formats a key. Raises
    `ConfigError` for an invalid name, or if a file exists without `force`; then nothing is written.
    """
    if not name or name != Path(name).name:
        raise ConfigError(f"name: expected a file name without a folder, found {name!r}")
    secret, public = folder / f"{name}.toml", folder / f"{name}.pub"
    there = [str(path) for path in (secret, public) if path.exists() or path.is_symlink()]
    if there and not force:
        raise ConfigError(f"{' and '.join(there)} would be overwritten; use another name or --force")
    folder.mkdir(parents=True, exist_ok=True)
    comment = "# The key pair of one instance. Anyone who has the secret key can act as this instance."
    content = f'{comment}\npublic = "{text(pair.public)}"\nsecret = "{text(pair.secret)}"\n'
    _replace(secret, content, mode=0o600)
    _replace(public, text(pair.public) + "\n", mode=0o644)
    return text(pair.public)


def _replace(path: Path, text: str, *, mode: int) -> None:
    """Atomic, with its permissions from the start."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
