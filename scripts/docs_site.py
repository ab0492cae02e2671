"""Hook of MkDocs: puts mermaid, which draws the diagrams, into the site, so that its pages load nothing from another host.

The program comes from its npm package, once, into the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

VERSION = "11.17.2"
MEMBER = "package/dist/mermaid.min.js"
TARGET = "javascripts/mermaid.min.js"
"""As `extra_javascript` of mkdocs.yml names it; Material for MkDocs uses it instead of its own address."""


class FetchError(Exception):
    """npm is missing, or could not fetch the package."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the program to the site's files. Without npm the theme loads it from its own address."""
    try:
        program = mermaid()
    except FetchError as error:
        print(f"docs: the diagrams are drawn by a program from another host: {error}", file=sys.stderr)
        config["extra_javascript"] = [each for each in config["extra_javascript"] if str(each) != TARGET]
        return files
    files.append(File.generated(config, TARGET, abs_src_path=str(program)))
    return files


def mermaid() -> Path:
    """The program in the cache. Raises `FetchError` if it is not there and npm cannot fetch it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disagg"
    cached = folder / f"mermaid-{VERSION}.min.js"
    if not cached.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            command = ["npm", "pack", "--silent", "--pack-destination", temporary, f"mermaid@{VERSION}"]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)  # noqa: S603 - its own words
            except (OSError, subprocess.SubprocessError) as error:
                raise FetchError(f"npm cannot fetch mermaid {VERSION}, which draws the diagrams: {error}") from error
            (archive,) = Path(temporary).glob("*.tgz")
            with tarfile.open(archive) as opened:
                found = opened.extractfile(MEMBER)
                assert found is not None
                (Path(temporary) / cached.name).write_bytes(found.read())
            (Path(temporary) / cached.name).replace(cached)
    return cached
