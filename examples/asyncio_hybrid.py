"""An asyncio server for a model with attention and Mamba layers: TP 2 to TP 1, with a prefix hit and an abort.

All ranks run in this process, over the `local` backend. In a server each rank is a process of its own, and calls the same
functions with its own manager.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from disagg import KVManager, ModelId, Pages, RequestAborted, Slot, Topology, combine, new_request_id
from disagg.state import mamba, paged

KERNEL = 4
ROLES = mamba.mamba2_roles(num_heads=8, head_dim=4, num_groups=2, state_size=8, kernel=KERNEL)


class Rank:
    """The state of one rank, of a model with an attention layer 0 and a Mamba layer 1, and its manager.

    Sizes of roles and heads are those of the whole model; tensors are this rank's part. A convolution has `KERNEL - 1` columns;
    Hugging Face's cache keeps `KERNEL` of them, so the oldest one, which the next token drops, is left out.
    """

    def __init__(self, name: str, topology: Topology, leader: str | None = None) -> None:
        self.kv = np.zeros((2, 32, 16, 4 // topology.tp, 8), np.float16)  # k and v: 32 pages of 16 tokens, 4 KV heads
        self.conv = np.zeros((8, 64 // topology.tp, KERNEL), np.float32)  # 8 slots, x ‖ B ‖ C
        self.ssm = np.zeros((8, 8 // topology.tp, 4, 8), np.float32)
        kv = paged.gqa({0: (self.kv[0], self.kv[1])}, axes="nhd", num_kv_heads=4, topology=topology)
        ssm = mamba.recurrent(ROLES, {"conv": {1: self.conv[:, :, 1:]}, "temporal": {1: self.ssm}}, topology=topology)
        self.manager = KVManager(
            name=name,
            topology=topology,
            leader=leader,
            components=[kv, ssm],
            model=ModelId("hybrid"),
            backend="local",
            admit="any",
        )


async def send_request(ranks: Sequence[Rank], request_id: bytes, pages: Sequence[int], slot: int, num_tokens: int) -> None:
    """Prefill: send each chunk of 32 tokens from every rank once it is computed, and the slot at the end."""
    senders = [rank.manager.sender(request_id) for rank in ranks]
    for start in range(0, num_tokens, 32):
        await asyncio.sleep(0.01)  # the model computes a chunk
        for sender in senders:
            sender.send({"kv": pages}, tokens=(start, min(start + 32, num_tokens)))
    for sender in senders:
        sender.finish({"ssm": Slot(slot)}, payload=b"first token")
    error = combine(await asyncio.gather(*senders))  # once every rank has ended
    if error is not None:
        raise error


async def load_request(
    rank: Rank,
    request_id: bytes,
    address: str,
    *,
    rows: Mapping[str, Pages | Slot],
    need: tuple[int, int],
    free: Callable[[], object],
) -> bytes:
    """Decode: receive the tokens that are not in the prefix cache, and the state. `free` is called if that fails."""
    receiver = rank.manager.receiver(
        request_id,
        peer="prefill",
        address=address,
        rows=rows,
        need={"kv": need},
    )
    try:
        event = await receiver
    except asyncio.CancelledError:  # the client has left: the request is aborted on both sides
        receiver.lease.on_release(free)
        raise
    if event.error is not None:
        receiver.lease.on_release(free)
        raise event.error
    return event.payload


async def main() -> None:
    first = Rank("prefill", Topology(tp=2, tp_rank=0))
    address = first.manager.address
    second, decode = Rank("prefill", Topology(tp=2, tp_rank=1), leader=address), Rank("decode", Topology())
    freed = asyncio.Event()
    free = partial(asyncio.get_running_loop().call_soon_threadsafe, freed.set)  # it may be called in another thread
    with first.manager, second.manager, decode.manager:
        for number, rank in enumerate((first, second), start=1):
            for state in (rank.kv, rank.conv, rank.ssm):
                state[...] = number
        request_id = new_request_id()  # 50 tokens, of which decode has the first 16 in its prefix cache
        sending = asyncio.create_task(send_request([first, second], request_id, [3, 9, 4, 1], 5, 50))
        rows: dict[str, Pages | Slot] = {"kv": Pages([7, 2, 8], first_token=16), "ssm": Slot(6)}
        assert await load_request(decode, request_id, address, rows=rows, need=(16, 50), free=free) == b"first token"
        await sending
        left = new_request_id()  # a request whose client leaves
        sending = asyncio.create_task(send_request([first, second], left, [3, 9, 4, 1], 5, 50))
        rows = {"kv": Pages([10, 11, 12, 13]), "ssm": Slot(3)}
        loading = asyncio.create_task(load_request(decode, left, address, rows=rows, need=(0, 50), free=free))
        await asyncio.sleep(0)
        loading.cancel()
        for task in (loading, sending):
            with suppress(asyncio.CancelledError, RequestAborted):
                await task
        await asyncio.wait_for(freed.wait(), 20)  # pages 10 to 13 and slot 3 are free again
    tokens = decode.kv[:, [7, 2, 8]].reshape(2, 48, 4, 8)
    assert np.array_equal(tokens[0, :34], np.full((34, 4, 8), [[1]] * 2 + [[2]] * 2))
    assert not tokens[:, 34:].any()
    assert (decode.conv[6, :, 1:].sum(axis=0) == 32 + 2 * 32).all()
    assert np.array_equal(decode.ssm[6], np.repeat([1, 2], 4 * 4 * 8).reshape(8, 4, 8))
    print("34 tokens and a slot arrived, byte for byte; an aborted request gave its pages back")


if __name__ == "__main__":
    asyncio.run(main())
