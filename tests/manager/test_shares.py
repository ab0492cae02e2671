"""Context parallelism whose shares depend on the number of tokens: prefill knows it only from the receiver's `need`."""

from __future__ import annotations

import numpy as np
import pytest

from disagg import KVManager, ModelId, Topology, new_request_id
from disagg.state import paged
from disagg.state.declare import page_blocks
from tests.support.cluster import DEADLINE_S

PAGE = 16


def start(name: str, topology: Topology, leader: KVManager | None = None) -> tuple[np.ndarray, KVManager]:
    pool = np.full((2, 8, PAGE, 2, 4), -1, np.float16)
    rule = {"tokens": page_blocks(PAGE)} if topology.cp > 1 else {}
    component = paged.gqa({0: (pool[0], pool[1])}, axes="nhd", num_kv_heads=2, topology=topology, **rule)  # type: ignore[arg-type]
    made = KVManager(
        name=name,
        topology=topology,
        components=[component],
        model=ModelId("m"),
        backend="local",
        admit="any",
        leader=None if leader is None else leader.address,
    )
    return pool, made


@pytest.mark.parametrize(("need", "is_refused"), [(40, False), (39, False), (33, False), (32, True), (16, True)])
def test_a_need_that_ends_before_the_last_page_is_refused(need: int, is_refused: bool) -> None:
    """Shares of other lengths would be other tokens: rank 0 has computed 0 to 31, rank 1 has 32 to 39."""
    first, leader = start("prefill", Topology(cp=2, cp_rank=0))
    second, follower = start("prefill", Topology(cp=2, cp_rank=1), leader)
    found, decode = start("decode", Topology())
    tokens = np.arange(48)
    for pool, page, at in ((first, 1, 0), (first, 2, 16), (second, 3, 32)):
        pool[:, page] = tokens[at : at + PAGE].reshape(1, PAGE, 1, 1)
    with leader, follower, decode:
        request = new_request_id()
        senders = leader.sender(request), follower.sender(request)
        for sender, pages in zip(senders, ([1, 2], [3]), strict=True):
            sender.finish({"kv": pages}, payload=b"")
        receiver = decode.receiver(
            request,
            peer="prefill",
            address=leader.address,
            rows={"kv": [5, 6, 7]},
            need={"kv": (0, need)},
            deadline_s=DEADLINE_S,
        )
        event = receiver.wait(timeout_s=DEADLINE_S)
        if is_refused:
            assert "the receiver's need must end in the last page of the prompt" in str(event.error)
        else:
            assert event.ok, event.error
            np.testing.assert_array_equal(found[0, [5, 6, 7], :, 0, 0].reshape(-1)[:need], tokens[:need])
