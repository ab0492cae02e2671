"""`python -m harness.pythons 3.11 3.12`: the installed interpreter of each version, one `VERSION PATH` a line.

Looks in `PATH`, and where pyenv and uv put interpreters. Versions that are not installed may come from Debian's packages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.debian import Foreign, fetched

RELEASES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
"""The release of Debian that has a version of Python. None has 3.12."""
_PROBE = "import sys; print('%d.%d' % sys.version_info[:2])"


def installed(version: str) -> Path | None:
    """An interpreter of a version such as `"3.12"` that is installed here and starts; otherwise `None`."""
    return next((path for path in _candidates(version) if _starts(path, version)), None)


def _candidates(version: str) -> Iterator[Path]:
    if (found := shutil.which(f"python{version}")) is not None:
        yield Path(found)
    for pattern in (".pyenv/versions", ".local/share/uv/python"):
        folders = Path.home().joinpath(pattern).glob(f"*{version}.*")
        yield from (
            folder / "bin" / f"python{version}" for folder in sorted(folders) if re.search(r"\d+t", folder.name) is None
        )


def _starts(path: Path, version: str) -> bool:
    try:
        ended = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return False
    return ended.stdout.strip() == version


def from_debian(version: str, folder: Path) -> Path:
    """An interpreter in `folder`, a new folder, from the release of Debian that has this version.

    It is a copy that loads that release's libraries, and runs and makes virtual environments like an installed one, except that
    these have no pip. Raises `FetchError`, and `KeyError` for a version that is not in `RELEASES`.
    """
    packages = (f"python{version}-venv", "libstdc++6")
    root = fetched(f"python{version}-amd64", packages, foreign=Foreign(RELEASES[version], "amd64")) / "root"
    patchelf = fetched("patchelf", ("patchelf",)) / "root/usr/bin/patchelf"
    python = folder / "bin" / f"python{version}"
    python.parent.mkdir(parents=True)
    shutil.copy2(root / f"usr/bin/python{version}", python)
    (folder / "lib").symlink_to(root / "usr/lib")
    libraries = root / "usr/lib/x86_64-linux-gnu"
    loader = libraries / "ld-linux-x86-64.so.2"
    subprocess.run(
        [patchelf, "--set-interpreter", loader, "--force-rpath", "--set-rpath", libraries, python],
        check=True,
    )
    return python


def main() -> int:
    for version in sys.argv[1:]:
        if (found := installed(version)) is not None:
            sys.stdout.write(f"{version} {found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
