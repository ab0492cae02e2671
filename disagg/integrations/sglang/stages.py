"""How decode's pipeline stages agree on the requests whose transfers have ended.

SGLang's stages agree on which have ended, not on how. One that failed on one stage would run on the others, which wait for it,
and the stages after the first would never hear of one that failed on all. Here the ids that SGLang passes from stage to stage
are followed by those of requests that have failed anywhere, each as `(id,)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll

Ids = Sequence[str | tuple[str]]


def ended_ids(scheduler: Any) -> Ids:
    """SGLang's `_pp_pd_get_decode_transferred_ids`: the requests that have ended on this stage and all before it."""
    before = None if scheduler.pp_group.is_first_rank else scheduler._pp_recv_pyobj_from_prev_stage()
    queue = scheduler.disagg_decode_transfer_queue.queue
    ended, failed = scheduler.get_rids(queue, False, [KVPoll.Success, KVPoll.Failed], [KVPoll.Failed])
    if before is not None:
        ended = [rid for rid in ended if rid in before]
        failed = [*failed, *(each[0] for each in before if isinstance(each, tuple))]
    return [*ended, *((rid,) for rid in dict.fromkeys(failed) if rid in ended)]


def release(original: Callable[[Any, Any], Any], scheduler: Any, ids: Ids | None) -> Ids | None:
    """SGLang's `process_decode_transfer_queue`, for the requests that all stages agree on. Returns those for the next one."""
    if ids is None:
        return original(scheduler, None)  # type: ignore[no-any-return]
    failed = {each[0] for each in ids if isinstance(each, tuple)}
    for each in scheduler.disagg_decode_transfer_queue.queue:
        if each.req.rid in failed:
            each.kv_receiver.conclude_state = KVPoll.Failed
    original(scheduler, [rid for rid in ids if isinstance(rid, str)])
    waiting = {each.req.rid for each in scheduler.disagg_decode_transfer_queue.queue}
    return [each for each in ids if (each if isinstance(each, str) else each[0]) not in waiting]
