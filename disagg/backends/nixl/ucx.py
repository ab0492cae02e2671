"""What UCX reads from the environment when an engine starts."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from disagg.backends.base import BackendOptions, Transport
from disagg.core.address import is_loopback
from disagg.core.errors import BackendUnavailable, ConfigError

CERTAIN = {Transport.TCP: "tcp", Transport.RDMA: "rdma"}
NOT_TRANSPORTS = frozenset({"UCX_MODULES", "UCX_USE_MT_MUTEX", "UCX_MAX_RMA_RAILS"})
"""They allow all requested transports, whatever their value."""
_SIOCGIFFLAGS, _IFF_LOOPBACK = 0x8913, 0x8  # linux/sockios.h, linux/if.h


def has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def ucx_settings(options: BackendOptions, *, rdma: bool, gpus: bool) -> dict[str, str]:
    """Raises `ConfigError` where UCX would open an unauthenticated TCP port off loopback without `trusted_network`."""
    wanted = options.wanted
    loopback = is_loopback(options.host)
    # UCX's progress thread and the poster share a lock that is held while bytes are copied: no spinlock.
    settings = {"UCX_USE_MT_MUTEX": "y"}
    if not rdma:
        # UCX's RDMA module loads a second libnl, with which the process ends in SIGSEGV.
        settings["UCX_MODULES"] = "^ib"
    if wanted in (Transport.AUTO, Transport.TCP) and not loopback and not options.trusted_network:
        raise ConfigError(
            f"backend 'nixl': transport {wanted.value!r} listens on host {options.host!r} without authentication; "
            "expected trusted_network=True, a loopback host, or transport 'rdma' or 'shm'"
        )
    # NIXL refuses a list without device memory on a host with GPUs.
    device = ",cuda" if gpus else ""
    lists = {Transport.TCP: "tcp", Transport.SHM: "shm,tcp", Transport.RDMA: "ib,self"}
    if wanted in lists:
        settings["UCX_TLS"] = lists[wanted] + device
    elif not options.stays_on_host:
        # UCX would copy to the process id in a peer's metadata, whoever that is on this host.
        settings["UCX_TLS"] = "^shm"
    if options.devices:
        settings["UCX_NET_DEVICES"] = ",".join(options.devices)
        if len(options.devices) > 1:
            settings["UCX_MAX_RMA_RAILS"] = str(len(options.devices))  # UCX would use one
    elif wanted is Transport.SHM or (loopback and wanted is not Transport.RDMA):
        settings["UCX_NET_DEVICES"] = _loopback_device()
    return settings


def conflicts(settings: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    wanted = {"UCX_TLS": "all", **settings}
    return [
        f"{name}={environ[name]!r} is set, {value!r} was asked for"
        for name, value in wanted.items()
        if name in environ and environ[name] != value and name not in NOT_TRANSPORTS
    ]


def _loopback_device() -> str:
    """`/sys` may show another network namespace's devices."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in sorted(name for _, name in socket.if_nameindex()):
            with suppress(OSError):  # it has just been removed
                asked = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sh14x", name.encode(), 0))
                if struct.unpack_from("h", asked, 16)[0] & _IFF_LOOPBACK:
                    return name
    raise BackendUnavailable("backend 'nixl': this host has no loopback network device")
