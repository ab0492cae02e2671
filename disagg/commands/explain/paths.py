"""The path that each component takes between a pair of ranks, and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from disagg.commands.cases.places import streams
from disagg.commands.explain.counting import CopyCounter, Count, mean_run_at_destination, run_end_reason
from disagg.commands.explain.engine import Engine
from disagg.commands.explain.instance import Instance
from disagg.commands.explain.summary import Pair, Part, PathShare
from disagg.commands.shell.text import size
from disagg.core.errors import ConfigError
from disagg.layout.binding import BoundRows, bind_rows
from disagg.layout.plan import TransferPlan
from disagg.runtime.paths import MIN_PIECES, Path, path_of
from disagg.runtime.streams import is_small


class Division(NamedTuple):
    counts: Mapping[str, Count]
    reason: str


def explain_pair(
    source: Instance, destination: Instance, ranks: tuple[int, int], plan: TransferPlan, engine: Engine, counter: CopyCounter
) -> Pair:
    parts: list[Part] = []
    packed_before: Counter[bool] = Counter()  # packed bytes of a chunk share staging buffers across components
    for name, component in plan.components.items():
        needed = destination.items[ranks[1]].needs[name]
        if needed[0] >= needed[1]:
            continue
        bound = bind_rows(
            component,
            source=source.rows(ranks[0], name),
            destination=destination.rows(ranks[1], name),
            tokens=needed,
            num_tokens=needed[1],
        )
        division = _divide(name, bound, engine, counter)
        chunk = streams(destination.spec.state(name))
        before, room = packed_before[chunk], engine.staging.slot_nbytes
        packed_before[chunk] += division.counts.get("packed", Count()).nbytes
        if any(count.nbytes for count in division.counts.values()):
            writes = -(-packed_before[chunk] // room) - -(-before // room)
            parts.append(_part(name, division, writes))
    return Pair(*ranks, tuple(parts), sum(part.bytes for part in parts))


def _part(name: str, division: Division, writes: int) -> Part:
    ways = {
        path: PathShare(*count, descriptors=writes if path == "packed" else count.runs)
        for path, count in division.counts.items()
        if count.nbytes
    }
    nbytes, runs = (sum(column) for column in zip(*division.counts.values(), strict=True))
    return Part(
        name=name,
        bytes=nbytes,
        runs=runs,
        run_bytes_mean=nbytes / runs,
        descriptors=sum(share.descriptors for share in ways.values()),
        way="mixed" if len(ways) > 1 else next(iter(ways)),
        reason=division.reason,
        ways=ways,
    )


def _divide(name: str, whole: BoundRows, engine: Engine, counter: CopyCounter) -> Division:
    """As the manager does (`disagg.runtime.paths`): small pieces travel packed unless they are few, and numbers are
    converted while they are packed. Raises `ConfigError` if they cannot be.
    """
    below, plan = engine.staging.pack_below, whole.plan
    total = counter.count(whole)
    directly = {"direct": total}
    small = tuple(i for i, span in enumerate(plan.spans) if is_small(plan, span, below))
    large = tuple(i for i in range(len(plan.spans)) if i not in small)
    why = _why(whole, total)
    if plan.converts and below:
        return Division({"packed": total}, f"{why}; numbers are converted while they are packed")
    if plan.converts and not engine.takes_spans:
        raise ConfigError(
            f"component {name!r}: {engine.name} converts numbers only while they are packed; expected a positive pack-below"
        )
    if plan.converts:
        return Division(directly, f"{why}; the engine converts numbers as it copies")
    if not below:
        return Division(directly, f"{why}; packing is off: the threshold is 0")
    if not small:
        which = "those of full pages are " if total.nbytes < total.runs * below else ""
        return Division(directly, f"{why}; {which}not below {engine.threshold}")
    if not whole.has_copies(MIN_PIECES):
        return Division(directly, f"{why}; fewer than {MIN_PIECES} runs do not justify a staging buffer's two messages")
    chosen = _only(whole, small)
    path = path_of(chosen, below, engine.staging.gathers_from)
    if path is Path.DIRECT:
        return Division(directly, f"{why}; {'most of them are ' if large else ''}not below {engine.threshold}")
    if path is Path.GATHERED:
        together = size(mean_run_at_destination(chosen))
        why = f"{why}; {together} are contiguous at the destination, and the engine gathers them"
        return Division(directly, why)
    if not large:
        return Division({"packed": total}, f"{why}; below {engine.threshold}")
    counts = {"direct": counter.count(_only(whole, large)), "packed": counter.count(chosen)}
    return Division(counts, f"{why}; only some tensors' pieces are below {engine.threshold}")


def _only(whole: BoundRows, spans: tuple[int, ...]) -> BoundRows:
    return BoundRows(whole.plan, spans, [whole.runs[number] for number in spans], whole.layers)


def _why(bound: BoundRows, total: Count) -> str:
    spans = [bound.plan.spans[number] for number, runs in zip(bound.numbers, bound.runs, strict=True) if len(runs)]
    widest = max(spans or bound.plan.spans, key=lambda span: span.nbytes)
    mean = f"runs of {size(total.nbytes / total.runs)}" if total.runs else "nothing"
    return f"{mean}: {run_end_reason(widest, bound.plan)}"
