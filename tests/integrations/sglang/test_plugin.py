"""How SGLang finds the transfer backend."""

from __future__ import annotations

import importlib.metadata
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
from sglang.srt.managers import data_parallel_controller, io_struct
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.plugins.hook_registry import HookRegistry

from disagg import ConfigError
from disagg.integrations.sglang import TESTED, plugin
from disagg.integrations.sglang.manager import Owner
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


class Ended(Owner):
    """A receiver of one rank that has ended in this way."""

    def __init__(self, room: Any, poll: KVPoll) -> None:
        self.bootstrap_room, self.conclude_state, self.clear = room, poll, lambda: None
        self.failure = "here" if poll == KVPoll.Failed else None


class Stage:
    """One of decode's pipeline stages, with requests that have ended there in these ways. It has SGLang's own methods."""

    pp_recv: Any

    def __init__(self, *, is_first: bool, **polls: KVPoll) -> None:
        self.reasons: dict[str, str] = {}
        queue = [
            SimpleNamespace(req=SimpleNamespace(rid=rid, bootstrap_room=rid), kv_receiver=Ended(rid, poll))
            for rid, poll in polls.items()
        ]
        self.pp_group = SimpleNamespace(is_first_rank=is_first)
        self.disagg_decode_prealloc_queue = SimpleNamespace(transfer_backend=SimpleNamespace(value="disagg"))
        self.disagg_decode_transfer_queue = SimpleNamespace(
            queue=queue, pop_transferred=self.pop_transferred, resolve_deferred_releases=lambda: None
        )
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
    ids = None
    for stage in stages:
        ids = stage.ended(before=ids)
    for stage in stages:
        assert stage.release(None) is None
        ids = stage.release(ids)
        assert stage.left == (["late"], ["all_ok"])
    here = [[name for name, reason in stage.reasons.items() if reason == "here"] for stage in stages]
    assert here == [["all_failed", "first"], ["all_failed", "second"], ["all_failed", "third"]]
    others = {reason for stage in stages for reason in stage.reasons.values()} - {"here"}
    assert others == {"Failed due to an unknown reason from another rank"}


@pytest.mark.parametrize(("num_stages", "event"), [(1, None), (2, "after the step")])
def test_chunks_of_a_pipeline_wait_for_the_step_that_computes_them(num_stages: int, event: str | None) -> None:
    """SGLang sends them at once where it schedules without overlap."""
    manager = SimpleNamespace(pp_size=num_stages, host=SimpleNamespace(launched=lambda: "after the step"))
    queue = SimpleNamespace(transfer_backend=SimpleNamespace(value="disagg"), kv_manager=manager)
    scheduler = SimpleNamespace(disagg_prefill_bootstrap_queue=queue, tree_cache=SimpleNamespace(disable=False))
    sender = SimpleNamespace(_early_send_wait_event=None)
    request = SimpleNamespace(
        extend_end=96,
        origin_input_ids=range(200),
        kv=SimpleNamespace(cache_protected_len=64),
        skip_radix_cache_insert=False,
        disagg_kv_sender=sender,
    )
    found: list[Any] = []
    plugin._send_cached(lambda *_, end_idx, **__: found.append((end_idx, sender._early_send_wait_event)), scheduler, request)
    assert found == [(64, event)]
