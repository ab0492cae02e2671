"""The programs of the guest: Debian packages, unpacked into a cache folder of the user."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

PROGRAMS = ("qemu-system-x86", "busybox-static", "iproute2", "ibverbs-providers")
"""With what they depend on; those that this machine has already are not fetched."""
KERNEL = "linux-image-amd64"
ATTEMPTS = 3
_COMPLETE = "complete"


class FetchError(Exception):
    """The packages could not be fetched or unpacked."""


def fetched() -> Path:
    """A folder with the unpacked packages, from the cache if it is complete there.

    Its folder `root` has the tree of a Debian system. Raises `FetchError`.
    """
    folder = _cache() / f"rdma-{_digest()}"
    if (folder / _COMPLETE).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    root, archives = folder / "root", folder / "archives"
    for path in (root / "usr/bin", root / "usr/sbin", root / "usr/lib", archives / "partial"):
        path.mkdir(parents=True)
    for name in ("bin", "sbin", "lib"):
        (root / name).symlink_to(f"usr/{name}")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _download(archives)
            break
        except FetchError:
            if attempt == ATTEMPTS:
                raise
            time.sleep(5 * attempt)
    for archive in sorted(archives.glob("*.deb")):
        _unpack(archive, root)
    shutil.rmtree(archives)
    (folder / _COMPLETE).touch()
    return folder


def _download(archives: Path) -> None:
    """Fetch all packages. The first failure may be due to lists of packages that are old or missing: update these."""
    fetch = [
        "apt-get",
        "-q",
        "-y",
        "-o",
        f"Dir::Cache::archives={archives}",
        "-o",
        "Debug::NoLocking=1",
        "-o",
        "Acquire::Retries=3",
    ]
    install = [*fetch, "--no-install-recommends", "--download-only", "install", *PROGRAMS]
    try:
        _run(install)
    except FetchError:
        if os.geteuid() == 0:
            _run(["apt-get", "-q", "update"])
        _run(install)
    # The kernel's own dependencies are tools that install it.
    depends = _run(["apt-cache", "depends", "--no-recommends", "--no-suggests", KERNEL])
    images = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
    if not images:
        raise FetchError(f"apt-cache names no kernel image for {KERNEL}:\n{depends}")
    _run([*fetch, "download", images[0]], folder=archives)


def _unpack(archive: Path, root: Path) -> None:
    """Unpack a package, with `/bin`, `/sbin` and `/lib` as links into `/usr`, as Debian 12 has them."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as contents:
        tar = ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--directory", str(root)]
        unpacked = subprocess.run(tar, stdin=contents.stdout, check=False).returncode == 0
    if not unpacked or contents.returncode != 0:
        raise FetchError(f"{archive} cannot be unpacked")


def _run(command: list[str], *, folder: Path | None = None) -> str:
    """The output of `command`; raises `FetchError` with its last lines."""
    try:
        done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is missing: the guest's programs come from Debian's packages") from error
    if done.returncode != 0:
        raise FetchError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disagg"


def _digest() -> str:
    """Names the recipe: a change in this file or of Debian's release makes a new folder."""
    recipe = Path(__file__).read_bytes() + Path("/etc/debian_version").read_bytes()
    return hashlib.sha256(recipe).hexdigest()[:16]
