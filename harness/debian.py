"""Programs of Debian's packages, unpacked into a cache folder of the user. Nothing is installed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ATTEMPTS = 3
_COMPLETE = "complete"
_APT = ("apt-get", "-q", "-y", "-o", "Debug::NoLocking=1", "-o", "Acquire::Retries=3")


_failed: dict[Path, str] = {}


class FetchError(Exception):
    """The packages could not be fetched or unpacked."""


@dataclass(frozen=True)
class Foreign:
    """Another release of Debian, for another architecture."""

    release: str
    architecture: str


def fetched(name: str, programs: Sequence[str], *, image_of: str | None = None, foreign: Foreign | None = None) -> Path:
    """A folder whose subfolder `root` has the tree of a Debian system with these packages, from the cache if it is complete
    there. `name` begins the folder's name.

    What the packages depend on is included, except for packages that this machine has. `image_of` is a meta-package of Linux,
    whose kernel image is unpacked, too, without its dependencies. With `foreign` nothing of this machine counts as there.
    Raises `FetchError`.
    """
    folder = _cache() / f"{name}-{_digest((*programs, image_of or '', repr(foreign)))}"
    if (folder / _COMPLETE).exists():
        return folder
    if shutil.which("apt-get") is None:
        raise FetchError("apt-get is missing: the programs come from Debian's packages")
    if folder in _failed:  # this process has tried, and others of its tests need not wait as long
        raise FetchError(_failed[folder])
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    root, archives = partial / "root", partial / "archives"
    for path in (root / "usr/bin", root / "usr/sbin", root / "usr/lib", archives / "partial"):
        path.mkdir(parents=True)
    for each in ("bin", "sbin", "lib"):
        (root / each).symlink_to(f"usr/{each}")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            if foreign is None:
                _download(archives, programs, image_of)
            else:
                _download_foreign(partial, archives, programs, foreign)
            break
        except FetchError as error:
            if attempt == ATTEMPTS:
                _failed[folder] = str(error)
                shutil.rmtree(partial)
                raise
            time.sleep(5 * attempt)
    for archive in sorted(archives.glob("*.deb")):
        _unpack(archive, root)
    shutil.rmtree(archives)
    (partial / _COMPLETE).touch()
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return folder


def _download(archives: Path, programs: Sequence[str], image_of: str | None) -> None:
    """Fetch all packages. The first failure may be due to lists of packages that are old or missing: update these."""
    fetch = [*_APT, "-o", f"Dir::Cache::archives={archives}"]
    install = [*fetch, "--no-install-recommends", "--download-only", "install", *programs]
    try:
        _run(install)
    except FetchError:
        if os.geteuid() == 0:
            _run(["apt-get", "-q", "update"])
        _run(install)
    if image_of is not None:  # its dependencies are tools that install it
        depends = _run(["apt-cache", "depends", "--no-recommends", "--no-suggests", image_of])
        images = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
        if not images:
            raise FetchError(f"apt-cache names no kernel image for {image_of}:\n{depends}")
        _run([*fetch, "download", images[0]], folder=archives)


def _download_foreign(folder: Path, archives: Path, programs: Sequence[str], foreign: Foreign) -> None:
    """Fetch all packages, with lists and a configuration of apt's own in `folder`, from the host that this machine's use."""
    state = folder / "state"
    (state / "lists/partial").mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (keyring, *_) = sorted(Path("/usr/share/keyrings").glob("debian-archive-keyring.*"))
    sources = state / "sources.list"
    sources.write_text(f"deb [signed-by={keyring}] {_archive()} {foreign.release} main\n")
    settings = {
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": folder / "cache",
        "Dir::Cache::archives": archives,
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "APT::Architecture": foreign.architecture,
        "APT::Architectures": foreign.architecture,
        "APT::Sandbox::User": "root",
    }
    apt = [*_APT, *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    (folder / "cache").mkdir(exist_ok=True)
    _run([*apt, "update"])
    _run([*apt, "--no-install-recommends", "--download-only", "install", *programs])


def _archive() -> str:
    """The address of Debian's archive in this machine's own sources."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    found = re.search(r"(?m)^(?:deb (?:\[.*\] )?|URIs: )(\S+/debian)/?(?:\s|$)", text)
    if found is None:
        raise FetchError("this machine's sources name no archive of Debian")
    return found[1]


def _unpack(archive: Path, root: Path) -> None:
    """Unpack a package, with `/bin`, `/sbin` and `/lib` as links into `/usr`, as Debian 12 has them."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as contents:
        tar = ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--directory", str(root)]
        unpacked = subprocess.run(tar, stdin=contents.stdout, check=False).returncode == 0
    if not unpacked or contents.returncode != 0:
        raise FetchError(f"{archive} cannot be unpacked")


def _run(command: list[str], *, folder: Path | None = None) -> str:
    """The output of `command`; raises `FetchError` with its last lines."""
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise FetchError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disagg"


def _digest(names: Sequence[str]) -> str:
    """Names the recipe: a change of the packages, in this file or of Debian's release makes a new folder."""
    recipe = Path(__file__).read_bytes() + Path("/etc/debian_version").read_bytes() + repr(names).encode()
    return hashlib.sha256(recipe).hexdigest()[:16]
