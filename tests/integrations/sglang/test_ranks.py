"""The transfer backend between rank processes, driven as SGLang's scheduler drives it, faults included."""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode

from disagg import Topology
from disagg.integrations.sglang import manager, plugin
from disagg.integrations.sglang.bootstrap import WAIT_S
from disagg.integrations.sglang.manager import DisaggKVManager
from disagg.runtime.peer_processes import PeerProcesses
from harness.ports import free_ports
from tests.integrations.sglang.memory import Model, Request
from tests.integrations.sglang.pair import ROOMS, running
from tests.integrations.sglang.ranks import HOST, Rank, RankProcess, Started, prompt_of
from tests.integrations.sglang.test_layout import GDN, MAMBA, MAMBA2, MODELS
from tests.support.inside import depth, has_reports, in_control_thread
from tests.support.tcp_proxy import proxies

GONE = "is gone: its (process|connection) has ended"
"""Why requests of a rank that was killed fail, long before its peers would miss a heartbeat."""


@pytest.fixture
def ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, which are forked from here, ask for a prefill that was replaced however soon after the last request that is."""
    monkeypatch.setattr(manager, "ASK_AGAIN_S", 0.0)


NBYTES_PER_TOKEN = 3 * 4 * (8 + 4) * 4
"""Of the model `heads`: layers, KV heads, elements of K and V, bytes of an element."""
HYBRID_WINDOW = Model(layers=(1, 3), window_layers=(0, 2), window_heads=2)
CASES = {
    "heads 2 to 1": (MODELS["heads"], 2, 1, (16, 16)),
    "heads 1 to 2, pages 16 to 64": (MODELS["heads"], 1, 2, (16, 64)),
    "latents 2 to 1": (replace(MODELS["latents"], layers=(0,)), 2, 1, (16, 16)),
    "latents 1 to 2": (MODELS["latents"], 1, 2, (32, 16)),
    "gdn 2 to 1": (GDN, 2, 1, (16, 16)),
    "gdn 1 to 2": (GDN, 1, 2, (16, 16)),
    "mamba2 2 to 1": (MAMBA2, 2, 1, (16, 16)),
    "mamba2 1 to 2": (MAMBA2, 1, 2, (16, 16)),
    "mamba 2 to 1": (MAMBA, 2, 1, (16, 16)),
    "window 2 to 1, pages 64 to 16": (HYBRID_WINDOW, 2, 1, (64, 16)),
    "index keys and tails": (MODELS["index"], 1, 1, (16, 16)),
    "draft": (MODELS["draft"], 1, 1, (16, 16)),
    "draft of heads beside latents 2 to 1": (MODELS["draft of heads beside latents"], 2, 1, (16, 16)),
    "draft with windows 1 to 2": (MODELS["draft with windows"], 1, 2, (16, 16)),
    "index keys and tails with a draft": (MODELS["index with a draft"], 1, 1, (16, 16)),
}


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until


@pytest.mark.parametrize("name", CASES)
def test_every_byte(name: str, tmp_path: Path) -> None:
    model, prefill, decode, page_sizes = CASES[name]
    with running(tmp_path, model, Topology(tp=prefill), Topology(tp=decode), page_sizes=page_sizes) as pair:
        rooms = [pair.begin(117), pair.begin(1), pair.begin(300, chunks=(128, 256)), pair.begin(200, prefix=64, chunks=(130,))]
        for room in rooms:
            pair.expect(room)


@pytest.mark.parametrize("backend", ["cma", "nixl"])
def test_ipv6(backend: str, tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology(), SGLANG_HOST_IP="::1", DISAGG_BACKEND=backend) as pair:
        assert pair.leaders["decode"].startswith("tcp://[::1]:")
        pair.expect(pair.begin(117))
        room, name = pair.begin(100, decode=False), pair.leaders["prefill"].removeprefix("tcp://")
        (decode,) = pair.decode
        decode.call(
            "decode", room, pair.request(decode, 100, 0), room % 1000, bootstrap=f"{name}@{name.replace('[::1]', '::1')}"
        )
        pair.expect(room)


def test_state_of_another_prompt_is_refused(tmp_path: Path) -> None:
    """Of as many tokens, which is what decode has compared before. The next request of the pair is served."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair:
        room = pair.begin(117, salt="another tenant's")
        (end,) = (rank.wait(room=room, status="failed") for rank in pair.decode)
        assert "expected the state of this request's prompt" in end["reason"]
        pair.expect(pair.begin(117))


class Damaged(RankProcess):
    """PyTorch refuses what prefill has sent of one room."""

    def _check_metadata(self, index: int, room: int) -> None:
        super()._check_metadata(index, room)
        if room % 1000 == 7:
            raise RuntimeError("value cannot be converted")


@pytest.mark.parametrize(("seed", "reason"), [(5000, "output_ids: expected 0 to 1999, found 5000"), (7, "cannot be converted")])
def test_what_prefill_says_of_a_request_is_checked(seed: int, reason: str, tmp_path: Path) -> None:
    """A token that the model does not have would end decode's scheduler. The next request of the pair is served."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology(), kind=Damaged) as pair:
        (prefill,), (decode,), room = pair.prefill, pair.decode, 2**50 + (7 - 2**50) % 1000
        prefill.call("prefill", room, pair.request(prefill, 100, 0), seed)
        decode.call("decode", room, pair.request(decode, 100, 0), 0)
        assert reason in decode.wait(room=room, status="failed")["reason"]
        pair.expect(pair.begin(117))


@pytest.mark.parametrize("prefix", [0, 64, 256])
def test_a_shorter_prompt_on_prefill_fails_at_once(prefix: int, tmp_path: Path) -> None:
    """Both sides name the reason, although decode has more tokens in its cache than prefill has at all."""
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology(tp=2), page_sizes=(64, 16)) as pair:
        room = pair.begin(86, decode=False)
        for rank in pair.decode:
            rank.call("decode", room, pair.request(rank, 303, prefix), room % 1000)
        for end in pair.expect(room, status="failed"):
            assert "prompt: expected 303 tokens, as on decode, found 86 on prefill" in end["reason"]
        for rank in pair.decode:
            rank.wait(room=room, released=True)
        pair.expect(pair.begin(117))


class Checked(RankProcess):
    """With SGLang's option for checksums."""

    def build(self, mode: DisaggregationMode) -> Any:
        DisaggKVManager.is_checked = True
        return super().build(mode)

    def num_verified(self) -> int:
        return int(self.manager.transfers.stats.verified)


@pytest.mark.parametrize(("verify", "num_verified"), [("", 2), ("off", 0)])
def test_sglangs_option_for_checksums(verify: str, num_verified: int, tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology(), kind=Checked, DISAGG_VERIFY=verify) as pair:
        for room in [pair.begin(117), pair.begin(300, chunks=(128, 256), prefix=64)]:
            pair.expect(room)
        assert pair.decode[0].ask("num_verified") == num_verified


def test_two_pipeline_stages_to_one(tmp_path: Path) -> None:
    with running(tmp_path, HYBRID_WINDOW, Topology(pp=2), Topology()) as pair:
        for room in [pair.begin(117), pair.begin(300, chunks=(128, 256), prefix=64)]:
            pair.expect(room)


def test_attention_data_parallelism(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(dp=2), Topology()) as pair:
        rooms = [2**61 + 2 * number for number in range(2)]
        for group in (1, 0):
            pair.begin(100, room=rooms[0] + group, group=group)
            pair.expect(rooms[0] + group, group=group)


class Replica(RankProcess):
    """Prefill's data-parallel ranks are replicas: without attention data parallelism, and an instance each."""

    balance = "follow_bootstrap_room"
    number = 0

    def build(self, mode: DisaggregationMode) -> Any:
        if mode == DisaggregationMode.PREFILL:
            parallel = conn.get_parallel()
            self.number, parallel.dp_size = self.topology.dp_rank, self.topology.dp
            parallel.attn_dp_size, parallel.attn_dp_rank, parallel.load_balance_method = 1, 0, self.balance
            self.topology = self.memory.topology = Topology()
            self.folder /= str(self.number)
        return super().build(mode)

    def kv_args(self) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(super().kv_args()), "system_dp_rank": self.number})


class Balanced(Replica):
    """Rooms do not tell which replica prefills them."""

    balance = "round_robin"

    def _decode(self, started: Started, say: Callable[..., None]) -> None:
        if not started.is_found:
            ranks = self.manager.bootstrap.room_ranks(self.bootstrap, [started.room])
            if not ranks:
                return
            started.aux = ranks[str(started.room)]
        super()._decode(started, say)


@pytest.mark.parametrize("kind", [Replica, Balanced])
def test_replicas_of_prefill(kind: type[Replica], tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(dp=2), Topology(), kind=kind) as pair:
        for room in (2**61, 2**61 + 1, 2**61 + 2):
            group = (room + (kind is Balanced)) % 2
            pair.begin(100, room=room, group=group)
            pair.expect(room, group=group)


def test_context_parallelism(tmp_path: Path) -> None:
    """Both ranks of prefill have all tokens. Each sends a part of them."""
    with running(tmp_path, MODELS["heads"], Topology(cp=2), Topology()) as pair:
        for room in [pair.begin(117), pair.begin(300, chunks=(128, 256), prefix=64)]:
            pair.expect(room)
        nbytes = [rank.ask("nbytes") for rank in pair.prefill]
        assert min(nbytes) > 0
        assert sum(nbytes) == (117 + 300 - 64) * NBYTES_PER_TOKEN


@pytest.mark.parametrize("name", ["heads 1 to 2, pages 16 to 64", "latents 1 to 2"])
def test_sglangs_size_of_a_transfer(name: str, tmp_path: Path) -> None:
    """If every page is full, it is the number of bytes written. Each decode rank gets all latents, or its own heads."""
    model, prefill, decode, page_sizes = CASES[name]
    with running(tmp_path, model, Topology(tp=prefill), Topology(tp=decode), page_sizes=page_sizes) as pair:
        end, *_ = pair.expect(pair.begin(128, chunks=(64,)))
        assert end["size"] == pair.prefill[0].ask("nbytes") > 0


def test_instances_change_roles(tmp_path: Path) -> None:
    """And change back. Each role has a bootstrap server of its own."""
    with running(tmp_path, MODELS["draft"], Topology(tp=2), Topology()) as pair:
        pair.expect(pair.begin(117))
        for _ in range(2):
            (port,) = free_ports(1)
            for rank in pair.ranks:
                rank.call("switch", port)
                rank.role = "decode" if rank.role == "prefill" else "prefill"
            leaders = {rank.role: rank.wait(switch=...)["switch"] for rank in pair.ranks}
            assert set(leaders.values()).isdisjoint(pair.leaders.values())  # other ports
            pair.leaders = leaders
            pair.prefill, pair.decode = pair.decode, pair.prefill
            for room in [pair.begin(117), pair.begin(300, chunks=(128, 256))]:
                pair.expect(room)


def test_a_chunk_that_is_sent_early_is_read_when_its_event_has_passed(tmp_path: Path) -> None:
    """Prefill writes the pages only after the chunk was sent, and waited for its event for some time."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair:
        room = pair.begin(300, chunks=(128,), early=True)
        (prefill,) = pair.prefill
        prefill.wait(room=room, status="reserved")
        pair.expect(pair.begin(90))  # other requests do not wait
        wait_for(lambda: prefill.ask("num_queries", room) >= 10)
        prefill.call("compute", room)
        pair.expect(room)


def test_decode_reserves_pages_when_the_step_before_has_ended(tmp_path: Path) -> None:
    """It may still write those of requests that have ended, and prefill writes as soon as it knows them."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair:
        pair.expect(pair.begin(90))
        (prefill,), (decode,) = pair.prefill, pair.decode
        decode.ask("launch")
        room = pair.begin(300)
        with pytest.raises(TimeoutError):
            prefill.wait(room=room, status="reserved", timeout_s=1.0)
        decode.ask("end_step")
        pair.expect(room)


class Embeds(RankProcess):
    """A rank whose requests replace the embeddings of some tokens."""

    def build(self, mode: DisaggregationMode) -> Any:
        manager = super().build(mode)
        given = SimpleNamespace(positions=[1], embeds=[[0.5]])
        manager.host = replace(manager.host, prompt=lambda started: replace(prompt_of(started), replaced=given))
        return manager


def test_a_prefix_of_plain_tokens_is_not_that_of_embeddings(tmp_path: Path) -> None:
    """SGLang's decode looks for the ids of the tokens only."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology(), kind=Embeds) as pair:
        room = pair.begin(100, prefix=32)
        assert "expected no cached prefix for embeddings" in pair.decode[0].wait(room=room, status="failed")["reason"]
        pair.prefill[0].wait(room=room, status="failed")


class FreesPages(RankProcess):
    """A rank whose control thread is busy while another rank of its server fails a request."""

    def fail_elsewhere(self, room: int) -> str:
        """What SGLang does on a rank once any rank has failed a request: it takes the pages for another one, which are read
        only then. The control thread hears of the copy's end before it hears of the failure. Returns the reason of the failure.
        """
        started, manager = self.started.pop(room), self.manager.transfers
        is_busy, go_on = threading.Event(), threading.Event()

        def be_busy(_: float) -> None:
            is_busy.set()
            go_on.wait(30)

        in_control_thread(manager, be_busy)
        is_busy.wait(30)
        assert started.event is not None
        with pytest.raises(KVTransferError) as failed:
            started.sender.failure_exception()
        self.free_aux.append(started.aux)
        self.memory.fill(started.request, started.seed + 1)
        started.event.has_passed = True
        while not has_reports(manager):
            time.sleep(0.001)
        go_on.set()
        return str(failed.value.failure_reason)


def test_pages_that_prefill_frees_on_all_ranks(tmp_path: Path) -> None:
    """One rank has sent its share, the other one's copy is under way when the first one fails."""
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology(), kind=FreesPages, DISAGG_PACK_BELOW="0") as pair:
        room = pair.begin(300, early=True)
        first, second = pair.prefill
        for rank in pair.prefill:
            rank.wait(room=room, status="reserved")
            wait_for(functools.partial(rank.ask, "num_queries", room))
        first.call("compute", room)
        assert "another rank" in second.ask("fail_elsewhere", room)
        for rank in (first, pair.decode[0]):
            assert "prefill has given up the request" in rank.wait(room=room, status="failed")["reason"]
        pair.decode[0].wait(room=room, released=True)
        pair.expect(pair.begin(100))


def test_a_prefix_of_40_pages_with_chunks(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology()) as pair:
        room = pair.begin(1000, prefix=640, chunks=(256, 512, 768))
        assert [rank.wait(room=room, status="reserved")["prefix"] for rank in pair.prefill] == [640, 640]
        pair.expect(room)


def test_many_requests_at_once_in_either_order(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology()) as pair:
        rooms = [next(ROOMS) for _ in range(12)]
        for room in rooms:
            pair.begin(90, room=room, prefill=room % 2 == 0, decode=room % 2 == 1)
        for room in rooms:
            pair.begin(90, room=room, prefill=room % 2 == 1, decode=room % 2 == 0)
        for room in rooms:
            pair.expect(room)


class JustLooked(RankProcess):
    """Prefill's scheduler has just looked at its senders, which took long, when a request comes that decode has reserved."""

    def create(self, room: int, request: Request, seed: int) -> int:
        """Returns the status of the request when SGLang chooses those of its next batch."""
        wait_for(lambda: depth(self.manager.transfers, "parked_reserves") == 1)
        self.manager._collect_at = math.inf
        self.prefill(room, request, seed)
        wait_for(lambda: self.started[room].sender.handle.readers is not None)
        plugin.collect_created(SimpleNamespace(transfer_backend=SimpleNamespace(value="disagg"), kv_manager=self.manager))
        self.manager._collect_at = 0.0
        return int(self.manager.request_status[room])


def test_a_request_that_decode_has_reserved_is_in_the_next_batch(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(), Topology(), kind=JustLooked) as pair:
        pair.expect(pair.begin(100))
        (prefill,), room = pair.prefill, pair.begin(100, prefill=False)
        assert prefill.ask("create", room, pair.request(prefill, 100, 0), room % 1000) == KVPoll.WaitingForInput
        pair.expect(room)


def test_aborts_and_a_room_that_comes_back(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology()) as pair:
        room = pair.begin(100)
        pair.expect(room)
        pair.begin(100, room=room)  # after a success
        pair.expect(room)
        pair.begin(100, room=room, held=True)
        for rank in pair.prefill:
            rank.wait(room=room, status="reserved")
        pair.decode[0].call("abort", room)  # decode leaves before anything is sent
        ends = pair.expect(room, status="failed")
        assert ends[-1]["reason"] == "Aborted by AbortReq."
        assert all("decode's scheduler" in end["reason"] for end in ends[:-1])
        pair.decode[0].wait(room=room, released=True)
        pair.begin(100, room=room, held=True)
        for rank in pair.prefill:
            rank.wait(room=room, status="reserved")
        for rank in pair.prefill:
            rank.call("abort", room)
        ends = pair.expect(room, status="failed")
        assert "prefill's scheduler" in ends[-1]["reason"]
        pair.decode[0].wait(room=room, released=True)
        pair.begin(100, room=room)
        pair.expect(room)


class Recomputes(RankProcess):
    """Prefill's HTTP server may fail a retracted request at any time."""

    def decode(self, room: int, *given: Any, **named: Any) -> None:
        super().decode(room, *given, **named)
        self.last, self.before = self.started[room].receiver, getattr(self, "last", None)

    def fail_recompute(self, which: str) -> bool:
        self.manager._fail_prefill_recompute(getattr(self, which), "prefill answers HTTP 500")
        return True


def test_a_failed_recompute_concerns_its_own_request_only(tmp_path: Path) -> None:
    """Not the next one of the room, nor one that comes after it."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology(), kind=Recomputes) as pair:
        (prefill,), (decode,), room = pair.prefill, pair.decode, pair.begin(100)
        pair.expect(room)
        assert decode.ask("fail_recompute", "last")
        pair.check_idle()
        for which in ("before", "last"):
            pair.begin(100, room=room, held=True)
            prefill.wait(room=room, status="reserved")
            assert decode.ask("fail_recompute", which)
            if which == "before":
                prefill.call("go", room)
                pair.expect(room)
        *_, end = pair.expect(room, status="failed")
        assert end["reason"] == "prefill answers HTTP 500"
        decode.wait(room=room, released=True)


@pytest.mark.parametrize("abort", [False, True])
def test_a_room_that_is_taken(abort: bool, tmp_path: Path) -> None:
    """A second request of a room fails at once, whatever the first one waits for, and does nothing to it."""
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology()) as pair:
        room = pair.begin(600, chunks=(320,), held=True, decode=False)
        check_taken(pair.prefill, room, abort=abort)
        pair.begin(600, room=room, prefill=False)
        for rank in pair.prefill:
            rank.wait(room=room, status="reserved")
        check_taken(pair.ranks, room, abort=abort)
        for _ in range(2):
            for rank in pair.prefill:
                rank.call("go", room)
            check_taken(pair.ranks, room, abort=abort)
        pair.expect(room)
        pair.begin(100, room=room)  # the room is free again
        pair.expect(room)


def check_taken(ranks: list[Rank], room: int, *, abort: bool) -> None:
    for rank in ranks:
        rank.call("again", room, abort=abort)
        found = rank.wait(again=...)["again"]
        assert found.startswith(f"[0, 0] bootstrap_room {room}: another request with this room is under way")


def test_a_room_whose_request_was_dropped_on_prefill(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(), Topology(), SGLANG_DISAGGREGATION_WAITING_TIMEOUT="3") as pair:
        room = pair.begin(100, held=True)
        (prefill,), (decode,) = pair.prefill, pair.decode
        prefill.wait(room=room, status="reserved")
        prefill.call("drop", room)
        assert "prefill's scheduler" in decode.wait(room=room, status="failed")["reason"]
        decode.wait(room=room, released=True)
        pair.begin(100, room=room)
        pair.expect(room)


def test_decode_leaves_before_it_looks_for_prefill(tmp_path: Path) -> None:
    """Prefill learns it where the request says where it is, as one that another server has prefilled does."""
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology()) as pair:
        room, name = pair.begin(100, decode=False), pair.leaders["prefill"].removeprefix("tcp://")
        (rank,) = pair.decode
        rank.call("decode", room, pair.request(rank, 100, 0), room % 1000, held=True, bootstrap=f"{name}@{name}")
        rank.call("abort", room)
        *ends, _ = pair.expect(room, status="failed")
        assert all("decode does not want the request" in end["reason"] for end in ends)


def test_prefill_that_nobody_asks_gives_up(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(), Topology(), SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT="1") as pair:
        room = pair.begin(100, decode=False)
        end = pair.prefill[0].wait(room=room, status=...)
        assert end["status"] == "failed"
        assert "KVPoll.Bootstrapping" in end["reason"]


def test_decode_whose_prefill_sends_nothing_gives_up(tmp_path: Path) -> None:
    """Prefill learns it, and the pages are free again."""
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology(), SGLANG_DISAGGREGATION_WAITING_TIMEOUT="1") as pair:
        room = pair.begin(100, held=True)
        *ends, end = pair.expect(room, status="failed")
        assert "KVPoll.WaitingForInput" in end["reason"]
        assert all("decode's scheduler" in each["reason"] for each in ends)
        pair.decode[0].wait(room=room, released=True)
        pair.expect(pair.begin(100))


@pytest.mark.usefixtures("ask_at_once")
@pytest.mark.parametrize(("backend", "is_attested"), [("cma", True), ("nixl", True), ("nixl", False)])
def test_prefill_is_killed_and_replaced(
    backend: str, is_attested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode's pages are free again, although a connection of its own to the dead process stays half closed. Between hosts no
    process is attested.
    """
    if not is_attested:
        monkeypatch.setattr(PeerProcesses, "attest", lambda *_: None)  # in the ranks, which are forked from here
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology(), DISAGG_BACKEND=backend) as pair:
        assert pair.decode[0].ask("keep_alive") == 200
        pair.expect(pair.begin(100))
        room = pair.begin(600, chunks=(320,), held=True)
        for rank in pair.prefill:
            rank.wait(room=room, status="reserved")
        for rank in pair.prefill:
            rank.kill()
        end = pair.decode[0].wait(room=room, status=...)
        assert end["status"] == "failed"
        assert re.search(GONE, end["reason"])
        pair.decode[0].wait(room=room, released=True)
        pair.prefill = pair.start("prefill", Topology(tp=2))
        room = pair.begin(100)
        pair.expect(room)


def test_prefill_is_killed_before_decode_has_met_it_a_second_time(tmp_path: Path) -> None:
    """The first request was made before the peer was ready, so nothing was known of it. The next one finds the new server."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair:
        room = pair.begin(600, chunks=(320,), held=True)
        (prefill,), (decode,) = pair.prefill, pair.decode
        prefill.wait(room=room, status="reserved")
        prefill.kill()
        assert decode.wait(room=room, status="failed")
        pair.prefill = pair.start("prefill", Topology())
        pair.expect(pair.begin(100))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_new_scales_of_k_and_v_fail_requests(role: str, tmp_path: Path) -> None:
    """Decode would read numbers that were stored with other scales. It checks its own once everything has arrived."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair:
        pair.expect(pair.begin(100))
        ((rank,), (other,)) = (pair.prefill, pair.decode) if role == "prefill" else (pair.decode, pair.prefill)
        rank.ask("load_scales")
        room = pair.begin(100)
        assert "scales of K and V" in rank.wait(room=room, status="failed")["reason"]
        other.wait(room=room, status="failed" if role == "prefill" else "ok")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_prefill_ends_before_it_is_reached(is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for it fail, when its bootstrap server names another one or none."""
    monkeypatch.setattr(manager, "ASK_AGAIN_S", 60.0)  # the answer that decode has counts as new, however slow the ranks are
    with running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair:
        (prefill,), (decode,) = pair.prefill, pair.decode
        decode.ask("look_up")
        prefill.kill()
        room = pair.begin(100, prefill=False)
        if is_replaced:
            pair.prefill = pair.start("prefill", Topology())
        assert "was removed" in decode.wait(room=room, status="failed")["reason"]
        decode.wait(room=room, released=True)
        if is_replaced:
            decode.ask("look_up")
            pair.expect(pair.begin(100))


def test_prefill_is_replaced_while_a_request_waits_for_pages(tmp_path: Path) -> None:
    """Decode does not turn to the old one again, which on another host might never refuse."""
    with running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair:
        (prefill,), (decode,) = pair.prefill, pair.decode
        pair.expect(pair.begin(100))
        waiting = 7
        decode.call("decode", waiting, pair.request(decode, 100, 0), 7, has_pages=False)
        decode.wait(room=waiting, found=True)
        prefill.kill()
        assert decode.ask("notice_end")
        pair.prefill = pair.start("prefill", Topology())
        pair.expect(pair.begin(100))
        decode.call("allocate", waiting)
        assert "was replaced while the request waited for pages" in decode.wait(room=waiting, status="failed")["reason"]
        pair.expect(pair.begin(100))


def test_a_bootstrap_server_that_takes_longer_than_a_step_waits(tmp_path: Path) -> None:
    """As on a host far away. SGLang looks for the answer once a second."""
    with (
        running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair,
        proxies(f"tcp://{HOST}:{pair.port}", delay_s=2 * WAIT_S) as (slow,),
    ):
        room = pair.begin(100, decode=False)
        (decode,) = pair.decode
        where = slow.address.removeprefix("tcp://")
        decode.call("decode", room, pair.request(decode, 100, 0), room % 1000, bootstrap=where)
        pair.expect(room)


def test_an_answer_for_a_request_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    """It names the prefill instance that was there then."""
    with (
        running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair,
        proxies(f"tcp://{HOST}:{pair.port}", delay_s=4 * WAIT_S) as (slow,),
    ):
        where, (prefill,), (decode,) = slow.address.removeprefix("tcp://"), pair.prefill, pair.decode
        room = next(ROOMS)
        decode.call("decode", room, pair.request(decode, 100, 0), 7, bootstrap=where)
        wait_for(lambda: decode.ask("lookups") == [False])
        decode.call("abort", room)
        decode.wait(room=room, status="failed")
        wait_for(lambda: decode.ask("lookups") == [True])
        prefill.kill()
        pair.prefill = pair.start("prefill", Topology())
        room = pair.begin(100, decode=False)
        decode.call("decode", room, pair.request(decode, 100, 0), room % 1000, bootstrap=where)
        pair.expect(room)


def test_decode_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(tp=2), Topology()) as pair:
        room = pair.begin(600, held=True)
        for rank in pair.prefill:
            rank.wait(room=room, status="reserved")
        pair.decode[0].kill()
        for rank in pair.prefill:
            end = rank.wait(room=room, status=...)
            assert end["status"] == "failed"
            assert re.search(GONE, end["reason"])
        pair.decode = pair.start("decode", Topology())
        pair.expect(pair.begin(100))


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    with running(tmp_path, MODELS["heads"], Topology(), Topology()) as pair:
        pair.model = replace(MODELS["heads"], dims=(8, 16))
        pair.decode = pair.start("decode", Topology())
        room = pair.begin(100, prefill=False)
        end = pair.decode[0].wait(room=room, status=...)
        assert end["status"] == "failed"
        assert "axis 'dim'" in end["reason"]
