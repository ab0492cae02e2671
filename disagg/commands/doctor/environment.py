"""Findings about `UCX_*` and `MC_*` variables, which engines read at start and which override a server's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from disagg.machine.findings import Finding, Level, Machine, ok
from disagg.machine.rdma import GID_VARIABLES

_IB = {
    "ib",
    "rc",
    "rc_v",
    "rc_x",
    "rc_verbs",
    "rc_mlx5",
    "ud",
    "ud_v",
    "ud_x",
    "ud_verbs",
    "ud_mlx5",
    "dc",
    "dc_x",
    "dc_mlx5",
    "srd",
}
_SHM = {"shm", "sm", "mm", "cma"}
_OTHERS = {
    "all", "tcp", "self", "posix", "sysv", "knem", "xpmem", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "gga", "rocm",
    "rocm_copy", "rocm_ipc", "ze", "ze_copy", "ze_ipc", "ugni",
}  # fmt: skip
_OFF = ("0", "false", "no", "n", "off")


def environment(machine: Machine) -> Iterator[Finding]:
    """Variables of GIDs are checked with the RDMA devices."""
    names = sorted(name for name in machine.environ if name.startswith(("UCX_", "MC_")) and name not in GID_VARIABLES)
    if not names:
        yield ok("environment", "no UCX_ or MC_ variable is set: engines use their defaults")
    for name in names:
        value, found = machine.environ[name], 0
        for finding in _RULES.get(name, _as_it_is)(machine, name, value):
            yield finding
            found += 1
        if not found:
            yield ok("environment", f"{name}={value!r} is set: no problem found")


def _as_it_is(_: Machine, name: str, value: str) -> Iterator[Finding]:
    yield ok("environment", f"{name}={value!r} is set: the engine reads it, and this check does not know it")


def _wrong(name: str, value: str, consequence: str, fix: str = "", *, level: Level = Level.ERROR, why: str = "") -> Finding:
    return Finding("environment", level, f"{name}={value!r} is set{why}", consequence, fix or f"unset {name}")


def _tls(machine: Machine, name: str, value: str) -> Iterator[Finding]:
    """Transports that UCX needs and the list excludes."""
    negative = value.startswith("^")
    listed = {part.strip().partition(":")[0].lstrip("\\") for part in value.lstrip("^").split(",")} - {""}
    unknown = sorted(listed - _IB - _SHM - _OTHERS)
    if unknown:
        yield _wrong(name, value, "UCX ignores unknown transports, and may have none left", level=Level.WARNING,
                     why=f"; UCX does not know the transport {', '.join(unknown)}")  # fmt: skip

    def has(kinds: set[str]) -> bool:
        return not kinds & listed if negative else bool(kinds & listed) or "all" in listed

    def fix(kind: str) -> str:
        return f"unset {name}" + ("" if negative else f", or export {name}={value},{kind}")

    if not has({"tcp"}) and not (has(_IB) and machine.rdma_devices):
        yield _wrong(
            name, value, "UCX has no transport for its messages, so backend 'nixl' does not start "
            "('no active messages transport')", f"unset {name}, or export {name}=shm,tcp", why=" and excludes tcp",
        )  # fmt: skip
    if not has(_SHM):
        yield _wrong(
            name, value, "processes of one host use the network stack, which is much slower; require='shm' is refused",
            fix("shm"), level=Level.WARNING, why=" and excludes shared memory (shm, cma)",
        )  # fmt: skip
    if machine.rdma_devices and not has(_IB):
        yield _wrong(
            name, value, f"the RDMA devices {', '.join(machine.rdma_devices)} are not used; require='rdma' is refused",
            fix("ib"), level=Level.WARNING, why=" and excludes ib",
        )  # fmt: skip
    if machine.gpus and not has({"cuda", "cuda_copy"}):
        yield _wrong(
            name, value, "on a machine with GPUs, NIXL refuses a list without device memory",
            fix("cuda"), why=" and excludes cuda",
        )  # fmt: skip


def _net_devices(machine: Machine, name: str, value: str) -> Iterator[Finding]:
    present = {*machine.entries("sys/class/net"), *machine.rdma_devices}
    wanted = [part.strip() for part in value.split(",") if part.strip()]
    missing = [device for device in wanted if device != "all" and device.partition(":")[0] not in present]
    if missing:
        yield _wrong(
            name, value, "UCX starts without it, or not at all", f"unset {name}, or choose from {', '.join(sorted(present))}",
            why=f", and there is no device {', '.join(missing)}",
        )  # fmt: skip
    if wanted == ["lo"]:
        yield _wrong(name, value, "other hosts cannot reach the engine", level=Level.WARNING, why=": loopback only")


def _modules(machine: Machine, name: str, value: str) -> Iterator[Finding]:
    if not machine.rdma_devices and not (value.startswith("^") and "ib" in value.lstrip("^").split(",")):
        yield _wrong(
            name, value, "without an RDMA device, UCX's module 'ib' loads a second libnl, and the process ends by SIGSEGV",
            f"unset {name}, or export {name}=^ib", level=Level.WARNING, why=" and does not exclude ib",
        )  # fmt: skip


def _force_tcp(machine: Machine, name: str, value: str) -> Iterator[Finding]:
    if machine.rdma_devices:
        yield _wrong(name, value, f"Mooncake does not use {', '.join(machine.rdma_devices)}; require='rdma' is refused",
                     level=Level.WARNING)  # fmt: skip


def _tcp_proto(_: Machine, name: str, value: str) -> Iterator[Finding]:
    if value == "1":
        yield _wrong(
            name, value, "Mooncake reports a write as done before it has arrived, so backend 'mooncake' refuses to start"
        )


def _pool(_: Machine, name: str, value: str) -> Iterator[Finding]:
    if value.lower() in _OFF:
        yield _wrong(name, value, "submitting blocks and does not keep the order, so backend 'mooncake' refuses to start")


def _timeout(_: Machine, name: str, value: str) -> Iterator[Finding]:
    yield _wrong(
        name, value, "Mooncake abandons a batch after that many seconds while it still runs, and its rows stay quarantined",
        level=Level.WARNING,
    )  # fmt: skip


def _queue(_: Machine, name: str, value: str) -> Iterator[Finding]:
    if not value.isdecimal() or int(value) < 64:
        yield _wrong(name, value, "few pieces are in flight at a time, which is slow", level=Level.WARNING)


def _ipv6(_: Machine, name: str, value: str) -> Iterator[Finding]:
    yield ok("environment", f"{name}={value!r} is set: Mooncake reaches IPv6 addresses only")


def _nvlink(machine: Machine, name: str, value: str) -> Iterator[Finding]:
    if not machine.gpus:
        yield _wrong(name, value, "Mooncake does not start: protocol 'nvlink_intra' needs GPUs",
                     why=", and there is no GPU")  # fmt: skip


_RULES: dict[str, Callable[[Machine, str, str], Iterator[Finding]]] = {
    "UCX_TLS": _tls,
    "UCX_NET_DEVICES": _net_devices,
    "UCX_MODULES": _modules,
    "MC_FORCE_TCP": _force_tcp,
    "MC_TCP_PROTO": _tcp_proto,
    "MC_TCP_ENABLE_CONNECTION_POOL": _pool,
    "MC_TRANSFER_TIMEOUT": _timeout,
    "MC_USE_IPV6": _ipv6,
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": _queue,
    "MC_INTRANODE_NVLINK": _nvlink,
    "MC_INTRA_NVLINK": _nvlink,
}
