"""RDMA on this host, as the kernel reports it. `disagg doctor` shows all findings; a backend that must use RDMA and cannot
refuses to start with the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from disagg.machine.findings import Finding, Level, Machine, ok

VERBS = "libibverbs1 ibverbs-providers rdma-core"
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
GID_VARIABLES = ("MC_GID_INDEX", "UCX_IB_GID_INDEX")
SMALL_MEMLOCK = 1 << 30
COUNTERS = (("counters/port_xmit_data", "counters/port_rcv_data", 4), ("hw_counters/sent_pkts", "hw_counters/rcvd_pkts", 0))
"""The files of a port that count traffic, and the bytes in one count (0: packets, which soft devices count)."""


def rdma_refusal(devices: Sequence[str] = (), machine: Machine | None = None) -> str | None:
    """Why RDMA cannot be used here, for a backend with `require="rdma"` that may use `devices`; `None` if no finding is
    against it.
    """
    found = [f for f in rdma(machine or Machine(), devices=devices, required=True, brief=True) if f.level is Level.ERROR]
    return " ".join(f"{finding}." for finding in found) or None


def rdma(machine: Machine, *, devices: Sequence[str] = (), required: bool = False, brief: bool = False) -> Iterator[Finding]:
    """Findings about devices, their ports and addresses. A missing device is an error only if `required`; a port that is
    down, only if no other is up. `brief`: do not count GIDs, of which a port may have a thousand.
    """
    missing = Level.ERROR if required else Level.WARNING
    present = machine.rdma_devices
    if not present:
        yield Finding(
            "rdma",
            missing,
            "this machine has no RDMA device (/sys/class/infiniband is empty)"
            + (f", and {', '.join(devices)} was asked for" if devices else ""),
            "between hosts bytes can go over TCP only",
            f"where there is such a NIC: apt install {VERBS} && modprobe mlx5_ib; in a container: --device /dev/infiniband "
            "--network host",
        )
        return
    wanted = [name.partition(":")[0] for name in devices]
    for name in devices:
        if name.partition(":")[0] not in present:
            yield Finding(
                "rdma",
                missing,
                f"device {name!r} was asked for, and this machine has {', '.join(present)}",
                "the engine finds no device to use",
                f"name one that is there, such as --device-nic {present[0]}",
            )
    if not [entry for entry in machine.entries("dev/infiniband") if entry.startswith("uverbs")]:
        yield Finding(
            "rdma",
            missing,
            f"there are RDMA devices ({', '.join(present)}), but no /dev/infiniband/uverbs*",
            "no process here can use them, as in a container that was not given them",
            "modprobe ib_uverbs; for a container: --device /dev/infiniband",
        )
    if required or machine.memlock is not None:
        yield memlock(machine, rdma=True)
    ports = [
        _port(machine, name, port, missing, brief=brief)
        for name in present
        if not devices or name in wanted
        for port in machine.entries(f"sys/class/infiniband/{name}/ports")
    ]
    usable = any(finding.level is Level.OK for finding in ports)
    yield from _gid_indices(machine, [name for name in present if not devices or name in wanted], missing)
    for finding in ports:
        yield msgspec.structs.replace(finding, level=Level.WARNING) if usable and finding.level is Level.ERROR else finding


def _port(machine: Machine, name: str, port: str, missing: Level, *, brief: bool) -> Finding:
    base, what = f"sys/class/infiniband/{name}/ports/{port}", f"RDMA device {name} port {port}"
    state = machine.read(f"{base}/state") or "unknown"
    rate, link = machine.read(f"{base}/rate") or "?", machine.read(f"{base}/link_layer") or "?"
    if "ACTIVE" not in state:
        return Finding(
            "rdma", missing, f"{what} is not up: state {state!r}", "nothing can be sent by it",
            f"rdma link show {name}/{port}; then bring its network device up: ip link set DEVICE up",
        )  # fmt: skip
    gids = _gids(machine, base)
    if (first := next(gids, None)) is None:
        return Finding(
            "rdma", missing, f"{what} has no GID", "peers cannot address it (RoCE takes GIDs from IP addresses)",
            "ip addr add ADDRESS/PREFIX dev DEVICE",
        )  # fmt: skip
    if brief:
        return ok("rdma", f"{what}: up, {rate}, {link}")
    used = [first, *gids]
    kinds = {i: machine.read(f"{base}/gid_attrs/types/{i}") or "" for i in used}
    second = [i for i, kind in kinds.items() if "v2" in kind]
    hint = f"; RoCE v2 at index {', '.join(sorted(second, key=int))} (UCX_IB_GID_INDEX, MC_GID_INDEX)" if second else ""
    traffic = Traffic.of(machine, base)
    so_far = f"; {traffic} so far" if traffic else ""
    return ok("rdma", f"{what}: up, {rate}, {link}, {len(used)} GIDs{hint}{so_far}")


class Traffic(NamedTuple):
    """What a port has sent and received: bytes or, if not `in_bytes`, packets."""

    sent: int
    received: int
    in_bytes: bool

    @classmethod
    def of(cls, machine: Machine, port: str) -> Traffic | None:
        """The traffic so far; `None` where the kernel does not count it."""
        for sent, received, nbytes in COUNTERS:
            counts = [machine.read(f"{port}/{name}") or "" for name in (sent, received)]
            if all(count.isdecimal() for count in counts):
                out, into = (int(count) * (nbytes or 1) for count in counts)
                return cls(out, into, bool(nbytes))
        return None

    def __str__(self) -> str:
        if self.in_bytes:
            return f"{self.sent / 1e6:.1f} MB sent, {self.received / 1e6:.1f} MB received"
        return f"{self.sent} packets sent, {self.received} received"


def watch(machine: Machine, seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[Finding]:
    """What each port sends and receives within that time: the shares of devices that ranks use together."""
    before = _traffic(machine)
    sleep(seconds)
    for (name, port), now in _traffic(machine).items():
        if (then := before.get((name, port))) is not None:
            moved = Traffic(now.sent - then.sent, now.received - then.received, now.in_bytes)
            yield ok("rdma", f"RDMA device {name} port {port}, within {seconds:g} s: {moved}")
    if not before:
        yield Finding(
            "rdma", Level.WARNING, "no RDMA device of this machine counts what it sends", "its traffic cannot be shown",
            "ls /sys/class/infiniband/*/ports/*/counters; in a container: mount /sys",
        )  # fmt: skip


def _traffic(machine: Machine) -> dict[tuple[str, str], Traffic]:
    ports = [(n, port) for n in machine.rdma_devices for port in machine.entries(f"sys/class/infiniband/{n}/ports")]
    found = {(name, port): Traffic.of(machine, f"sys/class/infiniband/{name}/ports/{port}") for name, port in ports}
    return {port: traffic for port, traffic in found.items() if traffic is not None}


def _gids(machine: Machine, port: str) -> Iterator[str]:
    return (index for index in machine.entries(f"{port}/gids") if _has_gid(machine, port, index))


def _has_gid(machine: Machine, port: str, index: str) -> bool:
    return (machine.read(f"{port}/gids/{index}") or NO_GID) != NO_GID


def _gid_indices(machine: Machine, names: Sequence[str], missing: Level) -> Iterator[Finding]:
    """A finding on each variable with an index at which no device has a GID."""
    folders = [f"sys/class/infiniband/{name}/ports" for name in names]
    ports = [f"{folder}/{port}" for folder in folders for port in machine.entries(folder)]
    for variable in GID_VARIABLES:
        value = machine.environ.get(variable)
        if value is None or value == "auto" or any(_has_gid(machine, port, value) for port in ports):
            continue
        if used := {index for port in ports for index in _gids(machine, port)}:
            indices = ", ".join(sorted(used, key=int))
            yield Finding(
                "rdma", missing, f"{variable}={value!r} is set, but on {', '.join(names)} GIDs are at index {indices} only",
                "the engine cannot connect by RDMA", f"unset {variable}, or set it to the index of a RoCE v2 GID",
            )  # fmt: skip


def memlock(machine: Machine, *, rdma: bool) -> Finding:
    if machine.memlock is None:
        return ok("memlock", "any amount of memory may be locked")
    found = f"at most {machine.memlock // 1024} KiB of memory may be locked (ulimit -l)"
    if not rdma:
        return ok("memlock", f"{found}; that matters with RDMA only, which is not here")
    total = machine.memory
    if total is not None and machine.memlock >= total:
        return ok("memlock", f"{found}; that is all there is")
    return Finding(
        "memlock",
        Level.ERROR if machine.memlock < SMALL_MEMLOCK else Level.WARNING,
        found,
        "registering pools that are larger with an RDMA device fails: they are pinned",
        "ulimit -l unlimited; for a service: LimitMEMLOCK=infinity; for a container: --ulimit memlock=-1",
    )
