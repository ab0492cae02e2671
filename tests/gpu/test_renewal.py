"""A rank whose staging slots on a GPU are lost to a peer of another host starts its engine again."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from disagg import Pages, new_request_id
from disagg.protocol.types import PeerRank
from disagg.runtime.connections import RENEW_AGAIN_S
from disagg.runtime.peer_processes import PeerProcesses
from disagg.testing import reference
from disagg.testing.reference import KVModel
from tests.gpu.test_manager import PATIENCE_S, Rank, send_request, some_pages, start
from tests.support.cluster import Side

pytestmark = pytest.mark.gpu

MODEL = KVModel(num_kv_heads=6, dims={"k": 64, "v": 64}, dtype="int16")
PREFILL = PeerRank("prefill-0", 0)
TOKENS = 61


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def open_pair(stack: ExitStack, decode: Rank) -> Rank:
    (prefill,) = start(MODEL, Side(), "prefill-0", "cuda:0", backend="nixl", transport="tcp")
    stack.callback(prefill.manager.close)
    prefill.manager.add_peer("decode-0", address=decode.manager.address)
    decode.manager.add_peer("prefill-0", address=prefill.manager.address)
    prefill.manager.wait_ready("decode-0", timeout_s=PATIENCE_S)
    decode.manager.wait_ready("prefill-0", timeout_s=PATIENCE_S)
    return prefill


def transfer(prefill: Rank, decode: Rank, seed: int) -> None:
    request, pages = new_request_id(), some_pages(np.random.default_rng(seed), decode.spec, TOKENS)
    decode.write(reference.allocate(MODEL, decode.spec))
    rows = {"kv": Pages(np.array(pages.ids, dtype=np.int32), 0)}
    receiver = decode.manager.receiver(request, peer="prefill-0", rows=rows, need={"kv": (0, TOKENS)}, deadline_s=PATIENCE_S)
    assert send_request(MODEL, [prefill], request, seed, TOKENS, TOKENS) == [True]
    event = receiver.wait(timeout_s=PATIENCE_S)
    assert event.ok, event.error
    wanted = reference.expected(MODEL, decode.spec, pages, num_tokens=TOKENS, need=(0, TOKENS))
    assert reference.first_difference(wanted, decode.read()) is None


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="engine nixl is not installed")
def test_slots_come_back_with_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = itertools.count(1)
    monkeypatch.setattr(PeerProcesses, "attest", lambda *_: None)
    monkeypatch.setattr("disagg.backends.nixl.backend.machine_identity", lambda: f"machine {next(machines)}")
    with ExitStack() as stack:
        (decode,) = start(MODEL, Side(page=16), "decode-0", "cuda:0", backend="nixl", transport="tcp")
        stack.callback(decode.manager.close)
        prefill = open_pair(stack, decode)
        runtime, lender = decode.manager._runtime, decode.manager._runtime.sessions.lender
        slots = lender._slots
        assert slots is not None

        def lend_three(_: float) -> None:
            lender._lend(lender._accounts[PREFILL], 3)

        for seed in range(3):
            transfer(prefill, decode, seed)
            assert runtime.stats.nbytes_by_way["packed"] == 0
            assert prefill.manager._runtime.stats.nbytes_by_way["packed"] > 0
            monkeypatch.setattr(prefill.manager._runtime.sessions.borrower, "give_back", lambda *_, **__: None)
            runtime.command(lend_three)
            until(lambda: lender.num_lent >= 3)
            prefill.manager.close()
            until(lambda seed=seed: runtime.connections.num_renewals == seed + 1)  # type: ignore[misc]
            until(lambda: runtime.connections._renew_again_s == RENEW_AGAIN_S)  # it has seen that this helped
            assert lender.num_lost == 0
            assert slots.num_free == slots.total
            prefill = open_pair(stack, decode)
        transfer(prefill, decode, 3)
