"""How SGLang finds the transfer backend."""

from __future__ import annotations

import importlib.metadata
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, KVTransferError
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.managers import data_parallel_controller, io_struct
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookRegistry

from disagg import ConfigError
from disagg.integrations.sglang import TESTED, plugin
from disagg.integrations.sglang.manager import DisaggKVManager, Owner
from disagg.integrations.sglang.receiver import DisaggKVReceiver
from disagg.integrations.sglang.sender import DisaggKVSender

DEFAULT_APP = "sglang.srt.entrypoints.http_server"


def test_importing_disagg_imports_no_engine() -> None:
    code = "import disagg, disagg.integrations.sglang, sys; sys.exit('sglang' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_entry_point_registers_the_backend() -> None:
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="disagg")
    assert entry.load() is plugin.register
    for _ in range(2):  # SGLang calls it in each process; twice changes nothing
        plugin.register()
    HookRegistry.apply_hooks()
    assert DISAGG_TRANSFER_BACKEND_CHOICES.count("disagg") == 1
    backend = utils.TransferBackend("disagg")
    assert utils.get_kv_class(backend, utils.KVClassType.SENDER) is DisaggKVSender
    assert utils.get_kv_class(backend, utils.KVClassType.BOOTSTRAP_SERVER) is CommonKVBootstrapServer
    fake = utils.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.SENDER)
    assert fake.__name__ == "FakeKVSender"  # others are as they were


@pytest.mark.parametrize(("application", "is_known"), [("disagg.integrations.sglang.workers", 1), (DEFAULT_APP, 0)])
def test_tokenizer_workers_know_the_backend(application: str, is_known: int) -> None:
    """In a process of `--tokenizer-worker-num`, which imports an application and loads no plug-ins."""
    code = f"""
from {application} import app
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.entrypoints import http_server
assert app is http_server.app
print(sum(each.value == "disagg" for each in TransferBackend._value2member_map_.values()))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(found.stdout.split()[-1]) == is_known


def test_versions_that_were_not_tested_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sglang.__version__ in TESTED
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.99: expected 0\.5\.23"):
        plugin.register()
    monkeypatch.setenv(plugin.ANY_VERSION, "1")
    plugin.register()


@pytest.mark.parametrize(("room", "worker"), [(None, 0), ([7], 0), (7, 1), (8, 0)])
def test_a_request_without_a_room_goes_to_a_scheduler_that_refuses_it(
    room: Any, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several data-parallel ranks. SGLang's own choice would end their controller."""
    plugin.register()
    HookRegistry.apply_hooks()
    sent: list[Any] = []
    for module in (data_parallel_controller, io_struct):
        monkeypatch.setattr(module, "sock_send", lambda *given: sent.append(given))
    options = SimpleNamespace(disaggregation_mode="prefill", disaggregation_transfer_backend="disagg")
    controller = SimpleNamespace(workers=["first", "second"], server_args=options)
    controller.maybe_external_dp_rank_routing = lambda request: DataParallelController.maybe_external_dp_rank_routing(
        controller, request
    )
    request = SimpleNamespace(bootstrap_room=room, routed_dp_rank=None)
    DataParallelController.follow_bootstrap_room_scheduler(controller, request)
    assert sent == [(controller.workers[worker], request)]


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        (
            "top_logprobs_num",
            [5],
            "a number of at least -1 for one prompt, found",
        ),  # its scheduler and its HTTP server compare it with a number
        ("logprob_start_len", [5], "a number of at least -1 for one prompt, found"),
        ("logprob_start_len", -5, "a number of at least -1 for one prompt, found -5"),
        ("session_params", {"id": "a"}, "none: prefill's session does not have the answers"),
    ],
)
def test_what_sglang_does_not_check_does_not_reach_the_scheduler(field: str, given: Any, expected: str) -> None:
    plugin.register()
    HookRegistry.apply_hooks()
    options = SimpleNamespace(disaggregation_mode="prefill", disaggregation_transfer_backend="disagg")
    tokenizer = SimpleNamespace(server_args=options)
    request = io_struct.GenerateReqInput(text="x", return_logprob=True, **{field: given})
    request.normalize_batch_and_arguments()
    with pytest.raises(ConfigError, match=f"{field}: expected {expected}"):
        TokenizerManager._validate_one_request(tokenizer, request, [1])


class Ended(Owner):
    """A receiver of one rank that has ended in this way."""

    def __init__(self, room: Any, poll: KVPoll) -> None:
        self.bootstrap_room, self.conclude_state, self.clear = room, poll, lambda: None
        self.failure = "here" if poll == KVPoll.Failed else None


class Transfers(DecodeTransferQueue):  # type: ignore[misc]
    """SGLang's queue of one stage, as far as failed requests wait there for their release. It notes which are released."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.released: list[int] = []
        self._deferred_releases: list[Any] = []
        self.gloo_group, self.enable_host_receive = SimpleNamespace(size=lambda: 1), False
        self.scheduler = SimpleNamespace(metrics_reporter=SimpleNamespace(enable_metrics=False))

    def _do_release(self, decode_req: Any, idx: int) -> None:
        room = decode_req.req.bootstrap_room
        decode_req.kv_receiver.kv_mgr.clear_deferred_abort_state(room)
        self.released.append(room)


class Stage:
    """One of decode's pipeline stages, with requests that have ended there in these ways. It has SGLang's own methods."""

    pp_recv: Any

    def __init__(self, *, is_first: bool, **polls: KVPoll) -> None:
        self.reasons: dict[str, str] = {}
        self.manager: Any = object.__new__(DisaggKVManager)
        self.manager.pp_size, self.manager.held, self.manager._served = 2, {}, {}
        transfers = self.disagg_decode_transfer_queue = Transfers()
        transfers.pop_transferred = self.pop_transferred
        transfers.queue = [
            SimpleNamespace(req=SimpleNamespace(rid=rid, bootstrap_room=rid), kv_receiver=Ended(rid, poll))
            for rid, poll in polls.items()
        ]
        self.pp_group = SimpleNamespace(is_first_rank=is_first)
        self.disagg_decode_prealloc_queue = SimpleNamespace(transfer_backend=SimpleNamespace(value="disagg"))
        self.enable_hisparse, self.waiting_queue = False, []  # type: ignore[var-annotated]

    def get_rids(self, queue: list[Any], _: bool, *groups: list[KVPoll]) -> tuple[list[str], ...]:
        return tuple([each.req.rid for each in queue if each.kv_receiver.conclude_state in group] for group in groups)

    def _pp_recv_pyobj_from_prev_stage(self) -> Any:
        return self.pp_recv

    def pop_transferred(self, rids: list[str]) -> list[Any]:
        queue = self.disagg_decode_transfer_queue.queue
        popped = [each for each in queue if each.req.rid in rids and each.kv_receiver.conclude_state != KVPoll.Transferring]
        queue[:] = [each for each in queue if each not in popped]
        for each in popped:
            if each.kv_receiver.conclude_state == KVPoll.Failed:
                with pytest.raises(KVTransferError) as raised:
                    each.kv_receiver.failure_exception()
                self.reasons[each.req.rid] = raised.value.failure_reason
        return [each.req for each in popped if each.kv_receiver.conclude_state == KVPoll.Success]

    def ended(self, *, before: Any = None) -> Any:
        self.pp_recv = before
        return SchedulerPPMixin._pp_pd_get_decode_transferred_ids(self)

    def release(self, ids: Any) -> Any:
        return SchedulerPPMixin.process_decode_transfer_queue(self, ids)

    def fail(self, room: int, *, attempt: int = 0, is_reserved: bool = True) -> Any:
        """Fail a request that has pages. Returns the lease of these pages, which is released once nothing can write there."""
        lease = SimpleNamespace(released=False)
        receiver: Any = object.__new__(DisaggKVReceiver)
        receiver.kv_mgr, receiver.bootstrap_room, receiver.bootstrap_addr = self.manager, room, "host:1"
        receiver.attempt, receiver.aux_index, receiver.bootstrap_infos, receiver.abort_notified = attempt, 0, [{}], False
        receiver.handle = SimpleNamespace(lease=lease, abort=lambda _: None) if is_reserved else None
        receiver.ensure_abort_notified(force_arm=True)
        if receiver.abort_notified:
            request = SimpleNamespace(req=SimpleNamespace(bootstrap_room=room), kv_receiver=receiver)
            self.disagg_decode_transfer_queue._deferred_releases.append((request, 0.0, math.inf, 0, 1))
        else:
            self.released.append(room)
        return lease

    @property
    def released(self) -> list[int]:
        """The rooms of the failed requests whose pages are free."""
        return self.disagg_decode_transfer_queue.released

    @property
    def left(self) -> tuple[list[str], list[str]]:
        """The requests that it waits for, and those that it runs."""
        waiting = self.disagg_decode_transfer_queue.queue
        return [each.req.rid for each in waiting], [request.rid for request in self.waiting_queue]


def test_pipeline_stages_of_decode_agree_on_how_transfers_have_ended() -> None:
    """A transfer that fails on one stage fails on all of them, and no stage keeps the request."""
    plugin.register()
    HookRegistry.apply_hooks()
    ok, failed, waits = KVPoll.Success, KVPoll.Failed, KVPoll.Transferring
    stages = [
        Stage(is_first=True, all_ok=ok, all_failed=failed, first=failed, second=ok, third=ok, late=ok),
        Stage(is_first=False, all_ok=ok, all_failed=failed, first=ok, second=failed, third=ok, late=waits),
        Stage(is_first=False, all_ok=ok, all_failed=failed, first=ok, second=ok, third=failed, late=ok),
    ]
    ids = agree(stages)
    for stage in stages:
        assert stage.release(None) is None
        ids = stage.release(ids)
        assert stage.left == (["late"], ["all_ok"])
    here = [[name for name, reason in stage.reasons.items() if reason == "here"] for stage in stages]
    assert here == [["all_failed", "first"], ["all_failed", "second"], ["all_failed", "third"]]
    others = {reason for stage in stages for reason in stage.reasons.values()} - {"here"}
    assert others == {"Failed due to an unknown reason from another rank"}


def agree(stages: list[Stage]) -> Any:
    ids = None
    for stage in stages:
        ids = stage.ended(before=ids)
    return ids


def release(stages: list[Stage], ids: Any) -> list[list[int]]:
    for stage in stages:
        ids = stage.release(ids)
    return [stage.released for stage in stages]


@pytest.mark.parametrize("first", [0, 1])
def test_pipeline_stages_of_decode_release_pages_together(first: int) -> None:
    """The first one takes the next request for all of them: one with less room would never get to it."""
    plugin.register()
    HookRegistry.apply_hooks()
    stages = [Stage(is_first=True), Stage(is_first=False)]
    leases = [stage.fail(room=7) for stage in stages]
    stages[first].fail(room=8)
    stages[1 - first].fail(room=8, is_reserved=False)
    leases[first].released = True
    for _ in range(2):
        assert release(stages, agree(stages)) == [[], []]
    leases[1 - first].released = True
    assert release(stages, agree(stages)) == [[7], [7]]


def test_a_room_that_is_used_again_is_released_when_its_last_request_is() -> None:
    """A stage may hear that nothing can write to the pages of the first one after the second one has failed."""
    plugin.register()
    HookRegistry.apply_hooks()
    stages = [Stage(is_first=True), Stage(is_first=False)]
    for stage in stages:
        stage.fail(room=7).released = True
    ids = agree(stages)
    leases = [stage.fail(room=7, attempt=1) for stage in stages]
    leases[1].released = True
    assert release(stages, ids) == [[], []]
    leases[0].released = True
    assert release(stages, agree(stages)) == [[7, 7], [7, 7]]


@pytest.mark.parametrize("option", [None, "--disable-radix-cache", "skip_radix_cache_insert"])
@pytest.mark.parametrize(("num_stages", "event"), [(1, None), (2, "after the step")])
def test_chunks_of_a_pipeline_wait_for_the_step_that_computes_them(
    num_stages: int, event: str | None, option: str | None
) -> None:
    """SGLang sends them at once where it schedules without overlap. What the cache owns of them is sent, or all without one."""
    manager = SimpleNamespace(pp_size=num_stages, host=SimpleNamespace(launched=lambda: "after the step"))
    queue = SimpleNamespace(transfer_backend=SimpleNamespace(value="disagg"), kv_manager=manager)
    cache = SimpleNamespace(disable=option == "--disable-radix-cache")
    scheduler = SimpleNamespace(disagg_prefill_bootstrap_queue=queue, tree_cache=cache)
    sender = SimpleNamespace(_early_send_wait_event=None)
    request = SimpleNamespace(
        extend_end=96,
        origin_input_ids=range(200),
        kv=SimpleNamespace(cache_protected_len=64),
        skip_radix_cache_insert=option == "skip_radix_cache_insert",
        disagg_kv_sender=sender,
    )
    found: list[Any] = []
    plugin._send_cached(lambda *_, end_idx, **__: found.append((end_idx, sender._early_send_wait_event)), scheduler, request)
    assert found == [(64 if option is None else None, event)]
