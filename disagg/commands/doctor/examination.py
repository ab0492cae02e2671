"""All checks of `disagg doctor`, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from disagg.commands.doctor import engines, network
from disagg.commands.doctor.environment import environment
from disagg.commands.doctor.machine import congestion, descriptors, gpus, ptrace, retransmission, shared_memory
from disagg.machine.findings import Finding, Level, Machine
from disagg.machine.rdma import memlock, rdma, watch


def examine(
    machine: Machine,
    *,
    names: Sequence[str] = tuple(engines.ENGINES),
    peers: Sequence[str] = (),
    require_rdma: bool = False,
    watch_s: float | None = None,
    start_engines: bool = True,
) -> Iterator[Finding]:
    """Every finding as soon as it is known; engines last, since they take seconds. `watch_s`: how long to watch the traffic of
    RDMA devices. Raises `ConfigError` for an invalid peer.
    """
    yield from rdma(machine, required=require_rdma)
    if not machine.rdma_devices:
        yield memlock(machine, rdma=False)
    if watch_s is not None:
        yield from watch(machine, watch_s)
    yield from gpus(machine)
    yield shared_memory(machine)
    yield descriptors()
    yield congestion(machine)
    yield retransmission(machine)
    yield from environment(machine)
    for address in peers:
        yield network.peer(address)
    if not start_engines:
        yield ptrace(machine)
        return
    yield engines.cma(machine)
    yield from engines.gpu_peers(machine)
    yield from engines.nvlink(machine)
    worked = False
    for name in names:
        for finding in engines.engine(name, machine):
            worked |= finding.level is Level.OK
            yield finding
    if not worked:
        yield Finding(
            "engines", Level.ERROR, f"no network engine works here, of {', '.join(names)}",
            "no state can be moved between hosts", "apply the fix of one engine above, then run disagg doctor again",
        )  # fmt: skip


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level of all findings; OK if there are none."""
    order: Callable[[Level], int] = [Level.OK, Level.WARNING, Level.ERROR].index
    return max((finding.level for finding in findings), key=order, default=Level.OK)
