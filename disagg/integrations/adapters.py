"""Which weights a LoRA adapter has, in a form that servers can compare: a digest of its files."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from pathlib import Path

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", ("*.safetensors", "adapter_model.bin", "adapter_model.pt")
"""An adapter's weights are in the first of these forms that it has."""
SMALL_NBYTES = 16 << 20
"""A thread reads larger adapters, so that the server goes on meanwhile."""
NUM_ADAPTERS = 4096
READ_AGAIN_S = 10.0
"""What could not be read is read again so much later: a shared file system may be away, or no descriptor left."""


class _Reading(Future[str]):
    """The digest of an adapter's files. They are read again from `again_at` on, if they could not be read."""

    again_at = math.inf

    def read(self, files: tuple[Path, ...], unread: Sequence[str]) -> None:
        """Without files, or if one cannot be read, the digest is unique."""
        digest = _digest(files, unread)
        if digest is None:
            self.again_at = time.monotonic() + READ_AGAIN_S
        self.set_result(digest or secrets.token_hex(16))


class Adapters:
    """Digests of adapters by path, read once, when first used. Files must not change while loaded, which servers' prefix
    caches require as well. `unread`: fields of `adapter_config.json` that the server ignores. An adapter that sets one has
    another effect here than in a server that reads it, so it has another digest.
    """

    def __init__(self, unread: Sequence[str] = ()) -> None:
        self._unread = unread
        self._found: OrderedDict[Hashable, _Reading] = OrderedDict()

    def digest(self, path: str, *, loaded: Hashable, may_change: bool = False) -> Future[str]:
        """`loaded` is the server's name of the adapter, new at each load, unless it may be read again in place
        (`may_change`). An unreadable adapter gets a unique digest, so its requests are not handed over.
        """
        key = path, loaded, _version(path) if may_change else None
        found = self._found.get(key)
        if found is None or time.monotonic() >= found.again_at:
            found = self._found[key] = _Reading()
            if len(self._found) > NUM_ADAPTERS:
                self._found.popitem(last=False)
            self._begin(path, found)
        return found

    def _begin(self, path: str, found: _Reading) -> None:
        try:
            files = adapter_files(path)
            is_small = sum(file.stat().st_size for file in files) <= SMALL_NBYTES
        except OSError as error:
            files, is_small = (), True
            logger.warning("adapter %r: its requests are not handed over, since it cannot be read: %s", path, error)
        reading = threading.Thread(target=found.read, args=(files, self._unread), name="disagg-adapter", daemon=True)
        try:
            if not is_small:
                reading.start()
                return
        except RuntimeError as error:  # no thread is left
            logger.warning("adapter %r: it is read at once: %s", path, error)
        found.read(files, self._unread)


def adapter_files(path: str) -> tuple[Path, ...]:
    """`path` is a folder or a repository in the local cache. Raises `OSError` if there are no files."""
    try:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(path, local_files_only=True))
    except (RuntimeError, ValueError) as error:  # no such user; an invalid name; not in the cache
        raise OSError(str(error)) from error
    weights = next((found for pattern in WEIGHTS if (found := sorted(folder.glob(pattern)))), None)
    if weights is None or not (folder / CONFIG).is_file():
        raise OSError(f"expected {CONFIG} and one of {', '.join(WEIGHTS)} in {folder}")
    return (folder / CONFIG, *weights)


def _version(path: str) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((stat.st_mtime_ns, stat.st_size) for stat in (file.stat() for file in adapter_files(path)))
    except OSError:
        return ()


def _digest(files: tuple[Path, ...], unread: Sequence[str]) -> str | None:
    """`None` without files, or if one cannot be read. The first one is `CONFIG`."""
    try:
        parts = [file.name.encode() + b"\0" + _content(file) for file in files]
        config = json.loads(files[0].read_bytes()) if files else {}
        parts += [f"{name} is not read".encode() for name in unread if config.get(name)]
    except (OSError, MemoryError, ValueError, AttributeError) as error:
        logger.warning("adapter: its requests are not handed over, since a file cannot be read: %s", error)
        parts = []
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest() if parts else None


def _content(file: Path) -> bytes:
    with file.open("rb") as data:
        return hashlib.file_digest(data, hashlib.blake2b).digest()
