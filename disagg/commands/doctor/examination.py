"""All checks of `disagg doctor`, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from disagg.commands.doctor import engines, network
from disagg.commands.doctor.environment import environment
from disagg.commands.doctor.machine import congestion, descriptors, gpus, ptrace, retransmission, shared_memory
from disagg.machine.findings import Finding, Level, Machine
from disagg.machine.rdma import memlock, rdma, watch


def examine(
    machine: Machine,
    *,
    names: Sequence[str] = (),
    peers: Sequence[str] = (),
    require_rdma: bool = False,
    watch_s: float | None = None,
    start_engines: bool = True,
) -> Iterator[Finding]:
    """Findings as soon as they are known; engines last, since they take seconds. One network engine of `names` must work;
    without names, all may be missing where engines of one host work. `watch_s`: how long to watch the traffic of RDMA
    devices. Raises `ConfigError` for an invalid peer.
    """
    where = [network.parse_peer(address) for address in peers]
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
    for host, port in where:
        yield network.peer(host, port)
    if not start_engines:
        yield ptrace(machine)
        return
    on_one_host: list[str] = []
    for finding in chain([engines.cma(machine)], engines.gpu_peers(machine), engines.nvlink(machine)):
        if finding.level is Level.OK and finding.topic in ("cma", "nvlink"):
            on_one_host.append(finding.topic)
        yield finding
    works = False
    for name in names or tuple(engines.ENGINES):
        for finding in engines.engine(name, machine):
            works |= finding.level is Level.OK
            yield finding
    if not works:
        yield _no_network_engine(names, on_one_host)


def _no_network_engine(names: Sequence[str], on_one_host: Sequence[str]) -> Finding:
    """An error if the user has named some, or no engine of one host works either."""
    nearby = f"{', '.join(on_one_host)} works" if on_one_host else "no engine works either"
    return Finding(
        "engines", Level.ERROR if names or not on_one_host else Level.WARNING,
        f"no network engine works here, of {', '.join(names or engines.ENGINES)}; between processes of this host {nearby}",
        "no state can be moved between hosts" if on_one_host else "no state can be moved",
        "apply the fix of one engine above, then run disagg doctor again",
    )  # fmt: skip


def worst(findings: Iterable[Finding]) -> Level:
    order: Callable[[Level], int] = [Level.OK, Level.WARNING, Level.ERROR].index
    return max((finding.level for finding in findings), key=order, default=Level.OK)
