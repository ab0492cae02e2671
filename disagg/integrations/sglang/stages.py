"""How decode's pipeline stages agree on which requests have ended or failed, and on the release of failed ones' pages.

SGLang's stages agree only on which have ended. A request that failed on one would run on the others, which would wait for
it. If each stage released pages by itself, a later one could lack room for a request that the first has taken. So the ids
that SGLang passes on also say which have failed, and to which pages nothing can write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import all_reduce_flags

Ids = Sequence[Sequence[Any]]
"""Requests that have ended on every stage so far; those that failed on any; and failed ones, by room and attempt, to whose
pages nothing can write.
"""


def ended_ids(scheduler: Any) -> Ids:
    """SGLang's `_pp_pd_get_decode_transferred_ids`."""
    before = None if scheduler.pp_group.is_first_rank else scheduler._pp_recv_pyobj_from_prev_stage()
    transfers = scheduler.disagg_decode_transfer_queue
    ended, failed = scheduler.get_rids(transfers.queue, False, [KVPoll.Success, KVPoll.Failed], [KVPoll.Failed])
    held = list(_held(transfers))
    flags = all_reduce_flags([each.is_drained for each in held], transfers.gloo_group, torch.distributed.ReduceOp.MIN)
    drained = [(each.bootstrap_room, each.attempt) for each, is_drained in zip(held, flags, strict=True) if is_drained]
    if before is not None:
        ended = [rid for rid in ended if rid in before[0]]
        failed = [*failed, *before[1]]
        drained = [each for each in drained if each in before[2]]
    return [ended, [rid for rid in dict.fromkeys(failed) if rid in ended], drained]


def release(original: Callable[[Any, Any], Any], scheduler: Any, ids: Ids | None) -> Ids | None:
    """SGLang's `process_decode_transfer_queue`, for the requests that all stages agree on. Returns those for the next one."""
    if ids is None:
        return original(scheduler, None)  # type: ignore[no-any-return]
    transfers = scheduler.disagg_decode_transfer_queue
    ended, failed, drained = ids
    for each in transfers.queue:
        if each.req.rid in failed:
            each.kv_receiver.conclude_state = KVPoll.Failed
    for receiver in _held(transfers):
        receiver.may_release |= (receiver.bootstrap_room, receiver.attempt) in drained
    original(scheduler, ended)
    waiting = {each.req.rid for each in transfers.queue}
    return [*([rid for rid in each if rid not in waiting] for each in (ended, failed)), drained]


def _held(transfers: Any) -> Iterator[Any]:
    """Every rank has the same receivers, in the same order."""
    return (entry[0].kv_receiver for entry in transfers._deferred_releases)
