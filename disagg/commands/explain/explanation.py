"""The explanation of one request. Its rows are those that `disagg-bench` deals, so bytes, pieces and posts are the same
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from disagg.commands.cases.workload import Case
from disagg.commands.explain.counting import CopyCounter
from disagg.commands.explain.engine import Engine, engine_of
from disagg.commands.explain.instance import Instance, instance_of
from disagg.commands.explain.paths import explain_pair
from disagg.commands.explain.summary import Link, Pair, Summary, hot_spots, link_seconds, nic_shares, partners
from disagg.core.errors import ConfigError, LayoutError
from disagg.layout.election import elect
from disagg.layout.plan import TransferPlan, make_plan


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    """`decode_model`: if it differs. `consecutive`: pages follow each other, instead of the benchmark's random ones."""

    case: Case
    decode_model: str | None = None
    consecutive: bool = False
    link: Link | None = None

    @property
    def engine(self) -> Engine:
        """The engine with the case's threshold. Raises `ConfigError`."""
        engine, pack_below = engine_of(self.case.backend, self.case.transport), self.case.pack_below
        return engine if pack_below is None else engine.with_threshold(pack_below, "the given threshold")


@dataclass(frozen=True, eq=False)
class Explanation:
    source: Instance
    destination: Instance
    plans: Mapping[tuple[int, int], TransferPlan]
    summary: Summary


def explain_request(request: ExplainRequest) -> Explanation:
    """Raises `ConfigError` for impossible sides, and for layouts that do not match, with both values."""
    engine, case = request.engine, request.case
    source = instance_of(case, "prefill", model=case.model, consecutive=request.consecutive)
    destination = instance_of(case, "decode", model=request.decode_model or case.model, consecutive=request.consecutive)
    try:
        election = elect(source.table, destination.table)
    except LayoutError as error:
        raise ConfigError(f"prefill {source.side} ('here') cannot serve decode {destination.side} ('peer'): {error}") from error
    plans = {
        (ours, theirs): make_plan(
            election,
            source=(ours, source.table, source.placements[ours]),
            destination=(theirs, destination.table, destination.placements[theirs]),
        )
        for ours, theirs in sorted(election.by_pair)
    }
    counter = CopyCounter()

    found = (explain_pair(source, destination, ranks, plan, engine, counter) for ranks, plan in plans.items())
    summary = _summary(request, engine, source, destination, tuple(pair for pair in found if pair.bytes))
    return Explanation(source, destination, plans, summary)


def _summary(
    request: ExplainRequest, engine: Engine, source: Instance, destination: Instance, pairs: tuple[Pair, ...]
) -> Summary:
    received = Counter[int]()
    link = request.link
    num_nics = link.num_nics if link else 1
    for pair in pairs:
        received[pair.destination] += pair.bytes
    parts = [part for pair in pairs for part in pair.components]
    return Summary(
        model=source.spec.name,
        tokens=request.case.tokens,
        prefill=str(source.side),
        decode=str(destination.side),
        backend=engine.name,
        transport=engine.transport,
        pack_below=engine.staging.pack_below,
        slot_bytes=engine.staging.slot_nbytes,
        pairs=pairs,
        total_bytes=received.total(),
        covered=all(destination.needed_nbytes(rank) == received[rank] for rank in range(len(destination.items))),
        runs=sum(part.runs for part in parts),
        descriptors=sum(part.descriptors for part in parts),
        link=link,
        link_seconds=link_seconds(pairs, link) if link else None,
        nics=tuple(nic_shares(pairs, num_nics=num_nics, cuts=engine.name == "nixl")) if num_nics > 1 else (),
        fan_out=partners(pairs, of="source"),
        fan_in=partners(pairs, of="destination"),
        hot_spots=tuple(hot_spots(pairs, len(source.items), len(destination.items))),
    )
