"""The explanation of one request: both instances, the plan of every pair of ranks, and what these come to.

Requests get their rows as `disagg-bench` deals them, so its bytes, pieces and posts for the same case are these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from disagg.commands.cases.costs import Costs
from disagg.commands.cases.workload import Case
from disagg.commands.explain.counting import CopyCounter
from disagg.commands.explain.engine import Engine, engine_of
from disagg.commands.explain.instance import Instance, instance_of
from disagg.commands.explain.paths import explain_pair
from disagg.commands.explain.summary import Faster, Pair, Summary, hot_spots, nic_shares, partners, predict
from disagg.core.errors import ConfigError, LayoutError
from disagg.layout.election import elect
from disagg.layout.plan import TransferPlan, make_plan

FASTER = 0.95
"""Another threshold is named if it is predicted to take less than this share of the time."""


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    """A case of the benchmark to be explained. `decode_model` is the decode side's model if it differs.

    `consecutive`: the request's pages follow each other, instead of the benchmark's random ones. `favoured`: pieces take the
    path that `costs` favour, unless the case has a threshold; without `costs`, a better threshold is looked for.
    """

    case: Case
    decode_model: str | None = None
    consecutive: bool = False
    costs: Costs | None = None
    favoured: bool = False

    @property
    def engine(self) -> Engine:
        """The case's engine, with the threshold and costs given here. Raises `ConfigError` for an unknown one."""
        engine, pack_below = engine_of(self.case.backend, self.case.transport), self.case.pack_below
        engine = engine._replace(costs=self.costs or engine.costs)
        if pack_below is not None:
            return engine.with_threshold(pack_below, "the given threshold")
        if self.favoured and self.costs is not None:
            return engine.with_threshold(self.costs.break_even_nbytes, "where these costs break even")
        return engine


@dataclass(frozen=True, eq=False)
class Explanation:
    """Both instances, the plan of each pair of ranks, and the summary."""

    source: Instance
    destination: Instance
    plans: Mapping[tuple[int, int], TransferPlan]
    summary: Summary


def explain_request(request: ExplainRequest) -> Explanation:
    """Explain a request. Raises `ConfigError` for impossible sides, and for layouts that do not match, with both values."""
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

    def explained(engine: Engine) -> tuple[Pair, ...]:
        found = (explain_pair(source, destination, ranks, plan, engine, counter) for ranks, plan in plans.items())
        return tuple(pair for pair in found if pair.bytes)

    pairs = explained(engine)
    summary = _summary(case.tokens, engine, source, destination, pairs)
    if request.favoured and request.costs is None and case.pack_below is None and engine.costs and summary.seconds is not None:
        longest = max((part.run_bytes_mean for pair in pairs for part in pair.components), default=0.0)
        below = min(engine.costs.break_even_nbytes, 1 << math.ceil(longest).bit_length())
        seconds, _ = predict(explained(engine.with_threshold(below, "")), engine.costs, one_link=engine.one_link)
        if seconds < FASTER * summary.seconds:
            summary = msgspec.structs.replace(summary, faster=Faster(below, seconds))
    return Explanation(source, destination, plans, summary)


def _summary(tokens: int, engine: Engine, source: Instance, destination: Instance, pairs: tuple[Pair, ...]) -> Summary:
    received = Counter[int]()
    seconds, phases = predict(pairs, engine.costs, one_link=engine.one_link) if engine.costs else (None, {})
    num_nics = engine.costs.num_nics if engine.costs else 1
    for pair in pairs:
        received[pair.destination] += pair.bytes
    parts = [part for pair in pairs for part in pair.components]
    return Summary(
        model=source.spec.name,
        tokens=tokens,
        prefill=str(source.side),
        decode=str(destination.side),
        backend=engine.name,
        transport=engine.transport,
        pack_below=engine.staging.pack_below,
        slot_bytes=engine.staging.slot_nbytes,
        costs=engine.costs,
        pairs=pairs,
        total_bytes=received.total(),
        covered=all(destination.needed_nbytes(rank) == received[rank] for rank in range(len(destination.items))),
        runs=sum(part.runs for part in parts),
        descriptors=sum(part.descriptors for part in parts),
        seconds=seconds,
        phases=phases,
        nics=tuple(nic_shares(pairs, num_nics=num_nics, cuts=engine.name == "nixl")) if num_nics > 1 else (),
        fan_out=partners(pairs, of="source"),
        fan_in=partners(pairs, of="destination"),
        hot_spots=tuple(hot_spots(pairs, len(source.items), len(destination.items))),
    )
