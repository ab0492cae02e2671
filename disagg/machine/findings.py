"""Findings about a host, and where probes look for them."""

from __future__ import annotations

import enum
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


class Level(enum.Enum):
    """`ERROR`: something that was requested, or that is installed, does not work."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """A cause; unless all is well, also its consequence and the command that fixes it."""

    topic: str
    level: Level
    cause: str
    consequence: str = ""
    fix: str = ""

    def __str__(self) -> str:
        parts = [self.cause, self.consequence, f"to fix it: {self.fix}" if self.fix else ""]
        return "; ".join(part for part in parts if part)


def ok(topic: str, cause: str) -> Finding:
    return Finding(topic, Level.OK, cause)


CAP_IPC_LOCK = 14


def _memlock() -> int | None:
    """In bytes. A process with CAP_IPC_LOCK, such as root's, has no limit."""
    for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == "CapEff" and int(value, 16) >> CAP_IPC_LOCK & 1:
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class Machine:
    """Where probes look: files below `root`, environment variables, the shared-memory mount, and the memlock limit in
    bytes (`None`: none).
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    shm: Path = Path("/dev/shm")  # noqa: S108 (only its size is read)
    memlock: int | None = field(default_factory=_memlock)

    def read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def entries(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in (self.root / path).iterdir()))
        except OSError:
            return ()

    @property
    def load(self) -> float:
        """The mean number of running processes in the last minute, per core; 0 if unreadable."""
        found = (self.read("proc/loadavg") or "0").split()
        return float(found[0]) / (os.cpu_count() or 1)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Bus addresses of NVIDIA GPUs."""
        return self.entries("proc/driver/nvidia/gpus")

    @property
    def memory(self) -> int | None:
        """In bytes."""
        lines = (self.read("proc/meminfo") or "").splitlines()
        found = [line.split()[1] for line in lines if line.startswith("MemTotal:")]
        return int(found[0]) << 10 if found else None

    @property
    def rdma_devices(self) -> tuple[str, ...]:
        return self.entries("sys/class/infiniband")
