"""What the kernel says: RDMA devices, GPUs, limits, and who may read whose memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from disagg.doctor.findings import Finding, Level, Machine, ok

SMALL_SHM = 64 << 20
"""What containers get by default: too little for anyone who shares memory by files."""
TINY_SHM = 16 << 20
VERBS = "libibverbs1 ibverbs-providers rdma-core"
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


# -- RDMA --------------------------------------------------------------------------------------------------------------


def rdma_refusal(devices: Sequence[str] = (), machine: Machine | None = None) -> str | None:
    """Why RDMA cannot be used here, in the words of `disagg doctor`; `None` where nothing speaks against it.

    For a backend that was told `require="rdma"`: `devices` are the ones that it may use.
    """
    found = [f for f in rdma(machine or Machine(), devices=devices, required=True) if f.level is Level.ERROR]
    return " ".join(f"{finding}." for finding in found) or None


def rdma(machine: Machine, *, devices: Sequence[str] = (), required: bool = False) -> Iterator[Finding]:
    """Devices, their ports and addresses. What is missing is an error only where RDMA is required."""
    missing = Level.ERROR if required else Level.WARNING
    present = machine.rdma_devices
    if not present:
        yield Finding(
            "rdma",
            missing,
            "this machine has no RDMA device (/sys/class/infiniband is empty)",
            "between hosts bytes can go over TCP only",
            f"where there is such a NIC: apt install {VERBS} && modprobe mlx5_ib; in a container: --device /dev/infiniband "
            "--network host",
        )
        return
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
    for name in present:
        for port in machine.entries(f"sys/class/infiniband/{name}/ports"):
            yield _port(machine, name, port, missing)


def _port(machine: Machine, name: str, port: str, missing: Level) -> Finding:
    """Whether one port is up and has an address."""
    base, what = f"sys/class/infiniband/{name}/ports/{port}", f"RDMA device {name} port {port}"
    state = machine.read(f"{base}/state") or "unknown"
    rate, link = machine.read(f"{base}/rate") or "?", machine.read(f"{base}/link_layer") or "?"
    if "ACTIVE" not in state:
        return Finding(
            "rdma", missing, f"{what} is not up: state {state!r}", "nothing can be sent by it",
            f"rdma link show {name}/{port}; then bring its network device up: ip link set DEVICE up",
        )  # fmt: skip
    gids = {i: machine.read(f"{base}/gids/{i}") or NO_GID for i in machine.entries(f"{base}/gids")}
    used = {i: gid for i, gid in gids.items() if gid != NO_GID}
    if not used:
        return Finding(
            "rdma", missing, f"{what} has no GID", "peers cannot address it (RoCE takes GIDs from IP addresses)",
            "ip addr add ADDRESS/PREFIX dev DEVICE",
        )  # fmt: skip
    kinds = {i: machine.read(f"{base}/gid_attrs/types/{i}") or "" for i in used}
    second = [i for i, kind in kinds.items() if "v2" in kind]
    hint = f"; RoCE v2 at index {', '.join(sorted(second, key=int))} (UCX_IB_GID_INDEX, MC_GID_INDEX)" if second else ""
    return ok("rdma", f"{what}: up, {rate}, {link}, {len(used)} GIDs{hint}")


def memlock(machine: Machine, *, rdma: bool) -> Finding:
    """How much memory may be pinned."""
    if machine.memlock is None:
        return ok("memlock", "any amount of memory may be locked")
    found = f"at most {machine.memlock // 1024} KiB of memory may be locked (ulimit -l)"
    if not rdma:
        return ok("memlock", f"{found}; that matters with RDMA only, which is not here")
    return Finding(
        "memlock", Level.ERROR, found, "registering pools with an RDMA device fails: they are pinned",
        "ulimit -l unlimited; for a service: LimitMEMLOCK=infinity; for a container: --ulimit memlock=-1",
    )  # fmt: skip


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpus(machine: Machine) -> Iterator[Finding]:
    """NVIDIA GPUs, and whether NICs can reach their memory. Nothing without the driver."""
    if not machine.entries("proc/driver/nvidia"):
        yield ok("gpu", "no NVIDIA driver: pools are in host memory")
        return
    yield ok("gpu", f"{len(machine.gpus)} NVIDIA GPUs")
    allocator = {name: machine.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    for name, value in allocator.items():
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            yield Finding(
                "gpu", Level.WARNING, f"{name}={value!r} makes expandable segments",
                "pools in them have no handle that a peer GPU on this host could map, so NVLink is not used for them",
                f"export {name}=expandable_segments:False",
            )  # fmt: skip
    if machine.rdma_devices:
        modules = {line.split()[0] for line in (machine.read("proc/modules") or "").splitlines() if line.split()}
        peer = modules & {"nvidia_peermem", "nv_peer_mem"}
        if peer:
            yield ok("gpu", f"module {', '.join(sorted(peer))}: NICs reach GPU memory")
        else:
            yield Finding(
                "gpu", Level.WARNING, "neither nvidia_peermem nor nv_peer_mem is loaded",
                "unless the driver exports DMA-BUF, NICs cannot reach GPU memory: registering it fails, or bytes go through "
                "the host",
                "modprobe nvidia_peermem",
            )  # fmt: skip


# -- sharing memory ----------------------------------------------------------------------------------------------------


def shared_memory(machine: Machine) -> Finding:
    """The size of the shared-memory mount."""
    try:
        stats = os.statvfs(machine.shm)
    except OSError as error:
        return Finding(
            "shm", Level.ERROR, f"{machine.shm} cannot be used: {error.strerror}", "no process can share memory by files",
            f"mount -t tmpfs -o size=8g tmpfs {machine.shm}",
        )  # fmt: skip
    total, free = stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail
    found = f"{machine.shm} has {total >> 20} MiB, {free >> 20} MiB of them free"
    if free > SMALL_SHM:
        return ok("shm", found)
    return Finding(
        "shm",
        Level.ERROR if free <= TINY_SHM else Level.WARNING,
        found,
        "whoever shares memory by files there (UCX's posix transport, NCCL, torch) fails with 'No space left on device' or "
        "dies of SIGBUS",
        f"mount -o remount,size=8g {machine.shm}; for a container: --shm-size=8g",
    )


def ptrace(machine: Machine) -> Finding:
    """Whether Yama lets processes that are not each other's ancestors copy each other's memory (CMA)."""
    scope = machine.read("proc/sys/kernel/yama/ptrace_scope")
    if scope is None or scope == "0":
        return ok("cma", f"ptrace scope: {scope or 'none (no Yama)'}")
    return cma_refused(f"kernel.yama.ptrace_scope is {scope}")


def cma_refused(why: str) -> Finding:
    """One process may not copy another's memory."""
    return Finding(
        "cma", Level.WARNING, f"processes here may not copy each other's memory: {why}",
        "backend 'nixl' has TCP between processes of this host, at a fraction of the speed; require='shm' is refused",
        "sysctl -w kernel.yama.ptrace_scope=0; for a container: --cap-add SYS_PTRACE, and one process-id namespace for both",
    )  # fmt: skip


# -- TCP ---------------------------------------------------------------------------------------------------------------


def congestion(machine: Machine) -> Finding:
    """TCP's congestion control."""
    found = machine.read("proc/sys/net/ipv4/tcp_congestion_control") or "unknown"
    if found != "bbr":
        return ok("tcp", f"congestion control: {found}")
    there = (machine.read("proc/sys/net/ipv4/tcp_available_congestion_control") or "").split()
    other = next((name for name in ("cubic", "reno") if name in there), "cubic")
    load = "" if other in there else f"modprobe tcp_{other} && "
    return Finding(
        "tcp", Level.WARNING, "TCP's congestion control is bbr, which paces what it sends",
        "TCP between processes of this host, and over short links, reaches less than half of what it could",
        f"{load}sysctl -w net.ipv4.tcp_congestion_control={other}",
    )  # fmt: skip
