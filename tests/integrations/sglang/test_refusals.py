"""A request that one server gives up before both know of it: the other server is told, and does not wait for minutes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode

from disagg import KVManager, ModelId, Receiver, Topology
from disagg.integrations.sglang import plugin
from disagg.integrations.sglang.bootstrap import Prefill, Served
from disagg.integrations.sglang.layout import components
from disagg.integrations.sglang.manager import DisaggKVManager
from disagg.integrations.sglang.receiver import DisaggKVReceiver
from disagg.integrations.sglang.rooms import Rooms
from disagg.integrations.sglang.rows import full_pages, needs, request_id
from tests.integrations.sglang.memory import Memory, Model

PATIENCE_S = 60.0
SERVER = "127.0.0.1:8998"
TOO_LONG = "the prompt is too long"


class Side:
    """A rank that has a scheduler's queue, a manager and pools."""

    def __init__(self, name: str, mode: DisaggregationMode) -> None:
        self.memory = Memory(Model(), Topology())
        self.facts = self.memory.facts()
        parts = components(self.memory.kv_args(), self.facts)
        model, listen = ModelId("test"), "tcp://127.0.0.1:0"
        self.transfers = KVManager(name=name, topology=Topology(), components=parts, model=model, listen=listen, admit="any")
        self.manager: Any = object.__new__(DisaggKVManager)
        self.manager.transfers, self.manager.disaggregation_mode = self.transfers, mode
        self.manager.rooms, self.manager._served = Rooms(), {}
        self.queue: Any = SimpleNamespace(transfer_backend=SimpleNamespace(value="disagg"), kv_manager=self.manager)

    def receive(self, room: int, sender: Side) -> Receiver:
        rows = full_pages(np.array([3, 4]), 0, facts=self.facts)
        return self.transfers.receiver(
            request_id(room),
            peer=sender.transfers.name,
            address=sender.transfers.address,
            rows=rows,
            need=needs(rows, num_tokens=32, prefix=0, facts=self.facts),
            deadline_s=None,
        )


@pytest.fixture
def prefill() -> Iterator[Side]:
    side = Side("prefill", DisaggregationMode.PREFILL)
    with side.transfers:
        yield side


@pytest.fixture
def decode() -> Iterator[Side]:
    side = Side("decode", DisaggregationMode.DECODE)
    with side.transfers:
        yield side


def asked(room: int, host: str = "127.0.0.1") -> Any:
    """A request whose answer SGLang has ended with an error."""
    reason = SimpleNamespace(message=TOO_LONG)
    return SimpleNamespace(bootstrap_room=room, bootstrap_host=host, bootstrap_port=8998, finished_reason=reason)


@pytest.mark.parametrize("door", ["in the queue", "before the queue", "its priority"])
@pytest.mark.parametrize("is_first", [False, True])
def test_decode_hears_what_prefill_refuses(prefill: Side, decode: Side, door: str, is_first: bool) -> None:
    """With its reason, whether or not decode has reserved by then."""
    receiver = None if is_first else decode.receive(7, prefill)
    if receiver is not None:
        decode.transfers.wait_ready("prefill", timeout_s=PATIENCE_S)
        time.sleep(0.2)
    if door == "in the queue":
        prefill.manager.check_request = lambda _: None
        prefill.queue.scheduler = SimpleNamespace(model_config=SimpleNamespace(vocab_size=8))
        prefill.queue.metadata_buffers = SimpleNamespace(output_top_logprobs_val=np.zeros((1, 4)))
        request = SimpleNamespace(
            **vars(asked(7)),
            multimodal_inputs=None,
            input_embeds=None,
            origin_input_ids=[1],
            logprob=None,
            return_logprob=False,
        )
        assert plugin._refuse(lambda *_: True, prefill.queue, request)
    else:
        scheduler = SimpleNamespace(disagg_prefill_bootstrap_queue=prefill.queue, disagg_decode_prealloc_queue=None)
        if door == "its priority":
            assert not plugin._check_priority(lambda *_: False, scheduler, asked(7))
        else:
            plugin._retire(lambda *_: None, scheduler, asked(7), "a message of some doors")
    event = (receiver or decode.receive(7, prefill)).wait(timeout_s=PATIENCE_S)
    assert TOO_LONG in str(event.error)
    assert event.lease.released
    assert all(found.tag() is None for found in prefill.transfers.events())


def test_a_request_under_way_survives_another_one_with_its_room(prefill: Side, decode: Side) -> None:
    prefill.manager.rooms.enter(7, object())
    sender = prefill.transfers.sender(request_id(7), peer=None, attempt=None, deadline_s=None)
    prefill.manager.refused(asked(7))
    receiver = decode.receive(7, prefill)
    while sender.readers is None:
        time.sleep(0.01)
    assert receiver.poll() is None


@pytest.mark.parametrize("host", ["127.0.0.1", "prefill@127.0.0.1"])
def test_prefill_hears_what_decode_refuses(prefill: Side, decode: Side, host: str) -> None:
    """Its bootstrap server names the instance, or the request does."""
    request = asked(7, host=host)
    if "@" in host:
        request.bootstrap_port = int(prefill.transfers.address.rpartition(":")[2])
    else:
        decode.manager._served[SERVER] = Served(
            SimpleNamespace(kv_cache_dtype=None), {0: Prefill("prefill", prefill.transfers.address, 0)}
        )
    sender = prefill.transfers.sender(request_id(7), peer=None, attempt=None, deadline_s=None)
    decode.queue.scheduler = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=8),
        output_streamer=SimpleNamespace(stream_output=lambda *_: None),
    )
    decode.queue.metadata_buffers = SimpleNamespace(output_top_logprobs_val=np.zeros((1, 4)))
    asked_for = {"return_logprob": False, "return_routed_experts": True, "routed_experts_start_len": 0}
    vars(request).update(asked_for, multimodal_inputs=None, input_embeds=None, origin_input_ids=[1])
    assert plugin._refuse(lambda *_: False, decode.queue, request)
    assert "routed_experts_start_len: expected 1" in request.finished_reason.message
    begun = time.monotonic()
    while not sender.is_declined:
        assert time.monotonic() < begun + PATIENCE_S
        time.sleep(0.01)


def test_prefill_hears_that_its_cache_has_another_dtype(prefill: Side, decode: Side) -> None:
    decode.manager.storage, decode.manager.kv_cache_dtype_str = "--hicache-storage-backend", "fp8_e4m3"
    place = Prefill("prefill", prefill.transfers.address, 0)
    decode.manager._served[SERVER] = Served(SimpleNamespace(kv_cache_dtype="bfloat16"), {0: place})
    decode.manager._located, failed = set(), []
    decode.manager.fail = lambda room, error: failed.append(str(error))
    sender = prefill.transfers.sender(request_id(7), peer=None, attempt=None, deadline_s=None)
    receiver: Any = object.__new__(DisaggKVReceiver)
    receiver.kv_mgr, receiver.bootstrap_addr, receiver.bootstrap_room = decode.manager, SERVER, 7
    receiver.prefill_dp_rank, receiver.prefill, receiver.attempt = 0, None, 0
    receiver._setup_bootstrap_infos()
    assert "expected bfloat16 as at" in failed[0]
    decode.manager.decline(receiver)
    begun = time.monotonic()
    while not sender.is_declined:
        assert time.monotonic() < begun + PATIENCE_S
        time.sleep(0.01)


def test_prefill_hears_of_a_data_parallel_rank_that_it_lacks(prefill: Side, decode: Side) -> None:
    """There is one instance only that it can be."""
    place = Prefill("prefill", prefill.transfers.address, 0)
    decode.manager._served[SERVER] = Served(SimpleNamespace(kv_cache_dtype=None), {0: place})
    sender = prefill.transfers.sender(request_id(7), peer=None, attempt=None, deadline_s=None)
    decode.manager.decline(SimpleNamespace(prefill=None, bootstrap_addr=SERVER, bootstrap_room=7, attempt=0))
    begun = time.monotonic()
    while not sender.is_declined:
        assert time.monotonic() < begun + PATIENCE_S
        time.sleep(0.01)


def test_a_replaced_prefill_is_told_nothing(decode: Side) -> None:
    """It would be dialled again for that."""
    gone, new = (Prefill(name, f"tcp://127.0.0.1:{port}", 0) for name, port in (("gone", 1), ("new", 2)))
    decode.manager._served[SERVER] = Served(SimpleNamespace(kv_cache_dtype=None), {0: new})
    receiver = SimpleNamespace(prefill=gone, bootstrap_addr=SERVER, bootstrap_room=7, attempt=0)
    decode.manager.decline(receiver)
    assert decode.transfers.peer("gone").state == "unknown"
    receiver.prefill = new
    decode.manager.decline(receiver)
    assert decode.transfers.peer("new").state != "unknown"


@pytest.mark.parametrize("room", [None, "x", 2**70, -1, [7], {}])
def test_a_room_that_cannot_be_is_refused_quietly(prefill: Side, decode: Side, room: Any) -> None:
    for side in (prefill, decode):
        side.manager.refused(asked(room))


@pytest.mark.parametrize("end", ["abort", "failure of another rank", "no room for its window"])
def test_prefill_hears_that_decode_will_not_reserve(end: str) -> None:
    """SGLang's ways out of the queue in which decode's requests wait for pages."""
    manager: Any = object.__new__(DisaggKVManager)
    manager.rooms, manager.request_status, manager.failure_records, manager.failure_lock = Rooms(), {}, {}, threading.Lock()
    manager.defer_decode_allocation, manager.deferred_bootstrap = False, None
    manager.addr_to_rooms_tracker, manager.prefill_response_tracker = defaultdict(set), {}
    manager.required_prefill_response_num_table, manager._deferred_ack_targets = {}, {}
    manager._deferred_ack_poisoned_rooms, manager._staging_outstanding = set(), {}
    manager.enable_deferred_decode_kv_release, manager.held = True, {}
    manager.check_prefill = manager.collect = lambda *_: None
    told = []
    manager.decline = lambda receiver: told.append(receiver.bootstrap_room)
    receiver = DisaggKVReceiver(manager, SERVER, 7)
    receiver.prefill, receiver.bootstrap_infos = Prefill("p", "tcp://127.0.0.1:1", 0), [{}]
    manager.update_status(7, KVPoll.WaitingForInput)
    if end == "abort":
        receiver.abort()
    elif end == "failure of another rank":
        with suppress(KVTransferError):
            receiver.failure_exception()
    receiver.clear()
    assert told == [7]
