"""Which weights a LoRA adapter has, as both servers of a request can tell: a digest of its files."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from pathlib import Path

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", ("*.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files of an adapter: its configuration, and the weights in the first of these forms that it has."""
SMALL_NBYTES = 16 << 20
"""Adapters up to this size are read at once, larger ones by a thread: the server goes on meanwhile."""
NUM_ADAPTERS = 4096


class Adapters:
    """The digests of the adapters that requests use, by path: each is read once, when it is first used.

    Its files must not change while it is loaded, which the servers' own prefix caches require as well.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Future[str]] = OrderedDict()

    def digest(self, path: str, *, loaded: Hashable, may_change: bool = False) -> Future[str]:
        """The digest of the adapter at `path`. `loaded` is what the server names it by, new each time it is loaded, unless the
        server reads it again in place (`may_change`).

        An adapter that cannot be read gets a digest that no other one has, so its requests are not handed over.
        """
        key = path, loaded, _version(path) if may_change else None
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = Future()
            if len(self._found) > NUM_ADAPTERS:
                self._found.popitem(last=False)
            self._begin(path, found)
        return found

    def _begin(self, path: str, found: Future[str]) -> None:
        try:
            files = adapter_files(path)
            is_small = sum(file.stat().st_size for file in files) <= SMALL_NBYTES
        except OSError as error:
            files, is_small = (), True
            logger.warning("adapter %r: its requests are not handed over, since it cannot be read: %s", path, error)
        if is_small:
            found.set_result(_digest(files))
        else:
            threading.Thread(target=lambda: found.set_result(_digest(files)), name="disagg-adapter", daemon=True).start()


def adapter_files(path: str) -> tuple[Path, ...]:
    """The files of the adapter at `path`, a folder or a repository in the local cache. Raises `OSError` if there are none."""
    try:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(path, local_files_only=True))
    except (RuntimeError, ValueError) as error:  # no such user; a name that cannot be; not in the cache
        raise OSError(str(error)) from error
    weights = next((found for pattern in WEIGHTS if (found := sorted(folder.glob(pattern)))), None)
    if weights is None or not (folder / CONFIG).is_file():
        raise OSError(f"expected {CONFIG} and one of {', '.join(WEIGHTS)} in {folder}")
    return (folder / CONFIG, *weights)


def _version(path: str) -> tuple[tuple[int, int], ...]:
    """When the files of the adapter at `path` were changed, and their sizes."""
    try:
        return tuple((stat.st_mtime_ns, stat.st_size) for stat in (file.stat() for file in adapter_files(path)))
    except OSError:
        return ()


def _digest(files: tuple[Path, ...]) -> str:
    """Of names and contents. Never the same twice without files, or if one cannot be read."""
    try:
        parts = [file.name.encode() + b"\0" + _content(file) for file in files]
    except OSError as error:
        logger.warning("adapter: its requests are not handed over, since a file cannot be read: %s", error)
        parts = []
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest() if parts else secrets.token_hex(16)


def _content(file: Path) -> bytes:
    with file.open("rb") as data:
        return hashlib.file_digest(data, hashlib.blake2b).digest()
