"""Findings about GPUs, shared memory, copies between processes, and TCP. RDMA is in `disagg.machine.rdma`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from disagg.machine.descriptors import FOR_SERVER, PER_RANK, soft_limit
from disagg.machine.findings import Finding, Level, Machine, ok
from disagg.machine.tcp import LONGEST_WAIT_S, SILENCE_S

SMALL_SHM = 64 << 20
"""The default of containers, too small for sharing memory by files."""
TINY_SHM = 16 << 20
FEW_DESCRIPTORS = 4096
"""A limit below this is worth a warning."""


def gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.entries("proc/driver/nvidia"):
        yield ok("gpu", "no NVIDIA driver: pools are in host memory")
        return
    yield ok("gpu", f"{len(machine.gpus)} NVIDIA GPUs")
    allocator = {name: machine.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    for name, value in allocator.items():
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            yield Finding(
                "gpu", Level.WARNING, f"{name}={value!r} makes expandable segments",
                "pools in such segments have no handle that a peer GPU could map, so NVLink is not used for them",
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
                "unless the driver exports DMA-BUF, NICs cannot reach GPU memory: registration fails, or transfers go "
                "through the host",
                "modprobe nvidia_peermem",
            )  # fmt: skip


def shared_memory(machine: Machine) -> Finding:
    try:
        if not machine.shm.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "no folder")
        stats = os.statvfs(machine.shm)
    except OSError as error:
        return Finding(
            "shm", Level.ERROR, f"{machine.shm} cannot be used: {error.strerror}", "processes cannot share memory by files",
            f"mount -t tmpfs -o size=8g tmpfs {machine.shm}",
        )  # fmt: skip
    total, free = stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail
    found = f"{machine.shm} has {total >> 20} MiB, of which {free >> 20} MiB are free"
    if free > SMALL_SHM:
        return ok("shm", found)
    return Finding(
        "shm",
        Level.ERROR if free <= TINY_SHM else Level.WARNING,
        found,
        "programs that share memory by files there (UCX's posix transport, NCCL, torch) fail with 'No space left on device' "
        "or end by SIGBUS",
        f"mount -o remount,size=8g {machine.shm}; for a container: --shm-size=8g",
    )


def ptrace(machine: Machine) -> Finding:
    """Whether Yama allows copies between unrelated processes (CMA)."""
    scope = machine.read("proc/sys/kernel/yama/ptrace_scope")
    if scope is None or scope == "0":
        return ok("cma", f"ptrace scope: {scope or 'none (no Yama)'}")
    return cma_refused(f"kernel.yama.ptrace_scope is {scope}")


def cma_refused(why: str) -> Finding:
    return Finding(
        "cma", Level.WARNING, f"processes here may not copy each other's memory: {why}",
        "backend 'cma' cannot be used: processes of this host use a network engine, at a fraction of the speed",
        "sysctl -w kernel.yama.ptrace_scope=0; for containers: --cap-add SYS_PTRACE, and shared PID and network namespaces",
    )  # fmt: skip


def descriptors() -> Finding:
    limit = soft_limit()
    if limit < 0:
        return ok("descriptors", "any number of descriptors")
    room = max(0, limit - FOR_SERVER) // PER_RANK
    found = f"at most {limit} descriptors (ulimit -n), enough for {room} ranks of peers"
    if limit >= FEW_DESCRIPTORS:
        return ok("descriptors", found)
    return Finding(
        "descriptors", Level.WARNING, found, "peers beyond that wait until others have left",
        "ulimit -n 65536; for a service: LimitNOFILE=65536; for a container: --ulimit nofile=65536",
    )  # fmt: skip


def congestion(machine: Machine) -> Finding:
    found = machine.read("proc/sys/net/ipv4/tcp_congestion_control") or "unknown"
    if found != "bbr":
        return ok("tcp", f"congestion control: {found}")
    there = (machine.read("proc/sys/net/ipv4/tcp_available_congestion_control") or "").split()
    other = next((name for name in ("cubic", "reno") if name in there), "cubic")
    load = "" if other in there else f"modprobe tcp_{other} && "
    return Finding(
        "tcp", Level.WARNING, "TCP's congestion control is bbr, which paces packets",
        "TCP between processes of this host, and over short links, reaches less than half of its speed",
        f"{load}sysctl -w net.ipv4.tcp_congestion_control={other}",
    )  # fmt: skip


def retransmission(machine: Machine) -> Finding:
    """How soon TCP notices that a link is back (`disagg.machine.tcp`)."""
    if machine.read("proc/sys/net/ipv4/tcp_rto_max_ms") is None:
        return ok("tcp", "after a cut link TCP waits up to as long again as the cut; Linux 6.15 and newer wait at most 1 s")
    return ok("tcp", f"after a cut link TCP waits at most {LONGEST_WAIT_S} s, and keeps its connections for {SILENCE_S} s")
