"""Starting Mooncake's engine: its module, protocol and environment."""

from __future__ import annotations

import importlib
import mmap
import os
import socket
from pathlib import Path
from typing import Any, Protocol

from disagg.backends.base import BackendOptions, Transport, check_rdma
from disagg.core.address import is_loopback
from disagg.core.copies import Addresses
from disagg.core.errors import BackendUnavailable, ConfigError
from disagg.machine.environment import environment

MAX_OUTSTANDING = 1024
"""Beyond its queue the engine rejects pieces, and may never serve the peer again."""
_NVLINK_SWITCHES = ("MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK")
IPV6_SWITCH = "MC_USE_IPV6"
"""Read by the engine whenever it resolves an address; any value is yes."""
_RDMA_DEVICES = Path("/sys/class/infiniband")
TRANSFER_ENGINE = "transfer_engine"
"""In the name of the library that a build of one's own may have beside the module."""
_WHEELS = "mooncake-transfer-engine-non-cuda without CUDA, mooncake-transfer-engine (CUDA 12) or -cuda13 with it"


class Engine(Protocol):
    """The part of `mooncake.engine.TransferEngine` that is used."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, addresses: list[int], nbytes: list[int], /) -> int: ...
    def send_probe(self, session: str, /) -> int: ...
    def batch_transfer_async(
        self, session: str, local: list[int], remote: list[int], nbytes: list[int], opcode: object, /
    ) -> int: ...
    def batch_transfer_async_write_arrays(self, session: str, local: Addresses, remote: Addresses, nbytes: Addresses, /) -> int:
        """From 0.3.14 on."""

    def transfer_check_status(self, batch: int, /) -> int: ...
    def get_batch_transfer_status(self, batches: list[int], /) -> int: ...


def import_engine() -> Any:
    try:
        # Read by the engine when it is loaded; below it a line is logged per chunk.
        with environment({"MC_LOG_LEVEL": "WARNING"}):
            return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"backend 'mooncake': no Python module {error.name!r}; install one of the packages {_WHEELS}", name=error.name
        ) from error
    except ImportError as error:
        library = str(error).partition(":")[0]
        raise BackendUnavailable(
            f"backend 'mooncake': the engine cannot be loaded: {error}. Where {library!r} is missing: Debian's libibverbs1 "
            "ibverbs-providers libnuma1 libcurl4 have what every build needs, with or without TCP; libcudart and libcuda come "
            f"with CUDA, and a host without it needs another wheel: {_WHEELS}",
            name=library,
        ) from error


def check_acknowledges(module: Any) -> None:
    """Raises `BackendUnavailable` for an engine that reports a write over TCP as done once it is sent. Later ones tell peers
    how they frame messages, by a name that is in the library.
    """
    loaded = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    parts = [str(module.__file__), *(path for path in sorted(loaded) if TRANSFER_ENGINE in path)]
    if not any(_holds(Path(path), b"tcp_proto_version") for path in parts):
        raise BackendUnavailable(
            f"backend 'mooncake': {module.__file__} reports writes over TCP as done before they have arrived; expected "
            "Mooncake 0.3.12.post1 or newer"
        )


def _holds(file: Path, name: bytes) -> bool:
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name) >= 0
    except (OSError, ValueError):  # replaced since, or empty
        return False


def choose_protocol(options: BackendOptions) -> str:
    wanted, present = options.wanted, _rdma_devices()
    if wanted is Transport.SHM:
        raise BackendUnavailable(
            "backend 'mooncake': no transport 'shm' (expected 'auto', 'rdma' or 'tcp'); backends 'cma' and 'nixl' have one"
        )
    check_rdma("mooncake", options)
    if wanted is Transport.TCP:
        return "tcp"
    if wanted is Transport.AUTO and any(name in os.environ for name in _NVLINK_SWITCHES):
        return "nvlink_intra"
    usable = [name for name in options.devices if name in present] if options.devices else list(present)
    if usable and "MC_FORCE_TCP" not in os.environ:
        return "rdma"
    if wanted is Transport.RDMA:
        raise BackendUnavailable("backend 'mooncake': transport 'rdma', but MC_FORCE_TCP is set; to fix it: unset MC_FORCE_TCP")
    return "tcp"


def ip_refusal(host: str) -> str | None:
    try:
        found = {entry[0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    if (socket.AF_INET6 if IPV6_SWITCH in os.environ else socket.AF_INET) in found:
        return None
    return (
        f"backend 'mooncake', host {host!r}: the engine reaches addresses of one IP version only, IPv6 if {IPV6_SWITCH} is in "
        f"the environment (now: {os.environ.get(IPV6_SWITCH)!r}); expected it set to 1 for an IPv6 host, and not set for an "
        "IPv4 host"
    )


def check_environment(options: BackendOptions, protocol: str) -> None:
    """Raises `ConfigError` if anyone could write, `BackendUnavailable` for an environment under which statuses prove nothing,
    or the host is unreachable.
    """
    if refusal := ip_refusal(options.host):
        raise BackendUnavailable(refusal)
    if protocol != "tcp":
        return
    if not is_loopback(options.host) and not options.trusted_network:
        raise ConfigError(
            f"backend 'mooncake', host {options.host!r}: its TCP data plane listens on every address and lets anyone read and "
            "write the registered memory; expected a loopback host, or trusted_network=True, or transport 'rdma'"
        )
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise BackendUnavailable("MC_TCP_PROTO=1: completions without acknowledgement prove nothing; expected it unset")
    if os.environ.get("MC_TCP_ENABLE_CONNECTION_POOL", "1").lower() in ("0", "false", "no"):
        raise BackendUnavailable("MC_TCP_ENABLE_CONNECTION_POOL: expected it on; without it posting blocks, and in no order")


def start_engine(module: Any, options: BackendOptions, protocol: str) -> Engine:
    settings = {
        # A wait for a batch must end with the batch; the manager has deadlines.
        "MC_TRANSFER_TIMEOUT": str(2**31 - 1),
    }
    if protocol == "tcp":
        settings["MC_FORCE_TCP"] = "1"  # otherwise the engine prefers RDMA devices
    with environment(settings):
        engine: Engine = module.TransferEngine()
        status = engine.initialize(options.host, "P2PHANDSHAKE", protocol, ",".join(options.devices))
    if status != 0:
        raise BackendUnavailable(
            f"backend 'mooncake': the engine did not start on host {options.host!r} with {protocol!r} (status {status})"
        )
    return engine


def outstanding_limit() -> int:
    text = os.environ.get("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "")
    return max(2, min(MAX_OUTSTANDING, int(text))) if text.isdecimal() and int(text) else MAX_OUTSTANDING


def _rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in _RDMA_DEVICES.iterdir())) if _RDMA_DEVICES.is_dir() else ()
