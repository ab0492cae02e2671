"""Files that commands write."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from disagg.core.errors import ConfigError


def check_files(files: Iterable[Path | None]) -> None:
    """Raise `ConfigError` if a file's folder is missing, or if two are the same. `-` is standard output."""
    given = [file.absolute() for file in files if file is not None and str(file) != "-"]
    for file in given:
        if given.count(file) > 1:
            raise ConfigError(f"{file}: expected another file for each option")
        if not file.parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent}")
