"""How decode's pipeline stages agree on the requests whose transfers have ended, and on the pages of those that have failed.

SGLang's stages agree on which have ended, not on how. One that failed on one stage would run on the others, which wait for it,
and the stages after the first would never hear of one that failed on all. Each stage would also release the pages of a failed
request as soon as nothing can write to its own: a later stage would then have no room for a request that the first one has
taken, which would wait for ever. Here the ids that SGLang passes from stage to stage also say which requests have failed, and
to which pages nothing can write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import all_reduce_flags

Ids = Sequence[Sequence[Any]]
"""The ids of requests that have ended on each stage so far, and of those that have failed on any of them; and by room and
attempt the failed ones that wait for their release, if nothing can write to their pages on any stage so far.
"""


def ended_ids(scheduler: Any) -> Ids:
    """SGLang's `_pp_pd_get_decode_transferred_ids`: the requests that have ended on this stage and all earlier ones."""
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
    """The receivers of failed requests that wait for their release: the same ones on every rank, in the same order."""
    return (entry[0].kv_receiver for entry in transfers._deferred_releases)
