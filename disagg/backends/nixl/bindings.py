"""NIXL's Python bindings, and their exceptions as this library's."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from disagg.core.errors import (
    BackendError,
    BackendUnavailable,
    DisaggError,
    LocalProtocolError,
    PeerUnreachable,
    RemoteProtocolError,
    TransferUnsettled,
)
from disagg.core.memory import CPU

FLAVOURS = ("nixl_cu13", "nixl_cu12")
"""Each is for one CUDA version."""
OLDEST = (1, 5)
"""A connection from 1.5 ends a process with 1.2 by SIGSEGV."""

ERRORS: Mapping[str, type[DisaggError]] = {
    "nixlBackendError": BackendError,
    "nixlCancelledError": TransferUnsettled,
    "nixlInvalidParamError": BackendError,
    "nixlMismatchError": RemoteProtocolError,
    "nixlNoTelemetryError": BackendError,
    "nixlNotAllowedError": BackendError,
    "nixlNotFoundError": PeerUnreachable,  # of a peer: the memory has been checked already
    "nixlNotPostedError": LocalProtocolError,
    "nixlNotSupportedError": BackendUnavailable,
    "nixlRemoteDisconnectError": PeerUnreachable,
    "nixlRepostActiveError": LocalProtocolError,
    "nixlUnknownError": BackendError,
}
"""They have no common base class."""


def has_gpu() -> bool:
    gpus = Path("/proc/driver/nvidia/gpus")
    return gpus.is_dir() and any(gpus.iterdir())


def version_of(bindings: ModuleType) -> str:
    """Of the package; empty if it was built without one."""
    package = bindings.__name__.partition(".")[0].replace("_", "-")
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def release_of(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version, which agents must have in common; `None` if it does not begin with them."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def check_version(version: str) -> None:
    """Raises `BackendUnavailable` for a version that a newer peer's first message would end."""
    found = release_of(version)
    if found is not None and found < OLDEST:
        expected = ".".join(map(str, OLDEST))
        raise BackendUnavailable(f"backend 'nixl': expected NIXL {expected} or newer, found {version} (pip install -U nixl)")


def load_bindings() -> ModuleType:
    """Raises `BackendUnavailable`.

    NIXL's Python class is not used: it spins, and it cancels a posted request when the handle is collected. Without a GPU
    any CUDA flavour works, and is loaded by its own name, because the common name would import torch to choose one.
    """
    try:
        if not has_gpu():
            for flavour in FLAVOURS:
                if importlib.util.find_spec(flavour) is not None:
                    return importlib.import_module(f"{flavour}._bindings")
        return importlib.import_module("nixl._bindings")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"backend 'nixl' needs the package 'nixl' (pip install nixl): {error}") from error


def engine_errors(bindings: ModuleType) -> tuple[type[Exception], ...]:
    own = [c for c in vars(bindings).values() if isinstance(c, type) and issubclass(c, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, IndexError, MemoryError)


class Bindings:
    def __init__(self) -> None:
        self.module: Any = load_bindings()
        self.version = version_of(self.module)
        check_version(self.version)
        self.errors = engine_errors(self.module)
        self.success = self.module.NIXL_SUCCESS
        self.in_progress = self.module.NIXL_IN_PROG

    def memory_kind(self, kind: str) -> Any:
        return self.module.DRAM_SEG if kind == CPU.kind else self.module.VRAM_SEG

    @contextmanager
    def mapped(self, what: str) -> Iterator[None]:
        """Translates NIXL's exceptions; `what` names the operation."""
        try:
            yield
        except self.errors as error:
            raise as_ours(what, error) from error


def as_ours(what: str, error: Exception) -> DisaggError:
    kind = ERRORS.get(type(error).__name__, BackendError)
    return kind(f"backend 'nixl': {what}: {type(error).__name__}: {error}")
