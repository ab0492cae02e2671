"""The transfer backend on SGLang 0.5.16, the last version for PyTorch 2.11, whose base classes differ from those of 0.5.23.

For measurements only: this version has no deferred release of decode's pages, so those of a failed request are used again at
once, perhaps while prefill still writes to them. Draft layers are refused. `sglang_servers.py` makes it known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices

from disagg.core.errors import ConfigError
from disagg.integrations.sglang import manager, receiver, sender
from disagg.integrations.sglang.host import Host, describe
from disagg.integrations.sglang.plugin import NAME, add_member, collect_created


def register() -> None:
    """Make the backend known to this process. A second call changes nothing."""
    if NAME in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    add_disagg_transfer_backend_choices([NAME])
    add_member(TransferBackend)
    Req.cache_salt = None
    package = "sglang.srt.disaggregation"
    HookRegistry.register(f"{package}.utils.get_kv_class", _kv_class, HookType.AROUND)
    HookRegistry.register(f"{package}.prefill.PrefillBootstrapQueue.create_sender", _create_sender, HookType.AROUND)
    HookRegistry.register(f"{package}.prefill.PrefillBootstrapQueue.pop_bootstrapped", collect_created, HookType.BEFORE)
    for queue in ("prefill.PrefillBootstrapQueue", "decode.DecodePreallocQueue"):
        HookRegistry.register(f"{package}.{queue}._init_kv_manager", _init_kv_manager, HookType.AROUND)


class DisaggKVManager(manager.DisaggKVManager):
    """One rank. Its rooms keep `Failed` until they are cleared."""

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        args.num_draft_entries = 0
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)

    def update_status(self, bootstrap_room: int, status: int) -> None:
        if self.request_status.get(bootstrap_room) != KVPoll.Failed:
            super().update_status(bootstrap_room, status)

    def hold(self, receiver: Any) -> None:
        """SGLang does not wait for its pages."""


class _Sender(CommonKVSender):  # type: ignore[misc]
    """SGLang's base class, with what that of 0.5.23 has besides."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, [], 0, req_has_disagg_prefill_dp_rank)
        self._early_send_wait_event: Any = None
        self._transfer_start_time: float | None = None
        self.init_time = time.time()

    def poll(self) -> int:
        return _poll(self, KVPoll.Bootstrapping, self._check_bootstrap_timeout)


class DisaggKVSender(sender.DisaggKVSender, _Sender):
    """Its last chunk ends at `num_tokens`, which SGLang does not pass to `send`."""

    num_tokens: int

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        dest_tp_ranks: list[int],
        pp_rank: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)

    def send(self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None) -> None:
        if state_indices is not None:
            num_kv_tokens = self.num_tokens - self.next_token
        super().send(kv_indices, state_indices, num_kv_tokens)


class _Receiver(CommonKVReceiver):  # type: ignore[misc]
    """SGLang's base class, with what that of 0.5.23 has besides."""

    conclude_state: Any
    abort_notified: bool

    def poll(self) -> int:
        return _poll(self, KVPoll.WaitingForInput, self._check_waiting_timeout)

    def clear(self) -> None:
        self._clear()

    def _clear(self) -> None:
        super().clear()
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)

    def abort(self) -> None:
        if self.conclude_state != KVPoll.Failed:
            self.kv_mgr.record_failure(self.bootstrap_room, "Aborted by AbortReq.")
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        if not self.abort_notified:
            self._send_abort_notification(force_arm=force_arm)
            self.abort_notified = True


class DisaggKVReceiver(receiver.DisaggKVReceiver, _Receiver):
    """Reserves pages as with 0.5.23."""


def _poll(one: Any, waits_in: int, check_timeout: Callable[[], int | None]) -> int:
    """The state of a sender's or receiver's room, in which a timeout runs while it is in the state `waits_in`."""
    if one.conclude_state is not None:
        return int(one.conclude_state)
    is_known = one.bootstrap_room in one.kv_mgr.request_status
    status = one.kv_mgr.check_status(one.bootstrap_room) if is_known else KVPoll.Failed
    if status == waits_in and check_timeout() is not None:
        status = KVPoll.Failed
    if status in (KVPoll.Success, KVPoll.Failed):
        one.conclude_state = status
    return int(status)


_CLASSES = {
    KVClassType.KVARGS: KVArgs,
    KVClassType.MANAGER: DisaggKVManager,
    KVClassType.SENDER: DisaggKVSender,
    KVClassType.RECEIVER: DisaggKVReceiver,
    KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
}


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    return _CLASSES[class_type] if transfer_backend.value == NAME else original(transfer_backend, class_type)


def _init_kv_manager(original: Callable[[Any], Any], queue: Any) -> Any:
    if queue.transfer_backend.value == NAME:
        manager.DisaggKVManager.host = _host_of(queue)
    return original(queue)


def _create_sender(original: Callable[..., Any], queue: Any, req: Any, *given: Any, **named: Any) -> Any:
    is_accepted = original(queue, req, *given, **named)
    if is_accepted and isinstance(req.disagg_kv_sender, DisaggKVSender):
        req.disagg_kv_sender.num_tokens = len(req.origin_input_ids)
        req.disagg_kv_sender.prompt = queue.kv_manager.host.prompt(req)
    return is_accepted


def _host_of(queue: Any) -> Host:
    options = queue.scheduler.server_args
    refused = {
        "--enable-dsa-cache-layer-split": options.enable_dsa_cache_layer_split,
        "--dcp-size": options.dcp_size > 1,
        "--enable-hisparse": queue.scheduler.enable_hisparse,
        "a draft model": queue.draft_token_to_kv_pool is not None,
    }
    found = [option for option, given in refused.items() if given]
    if found:
        raise ConfigError(f"transfer backend disagg on SGLang 0.5.16: expected no {found[0]}, which it does not support")
    return describe(queue, reuses_pages=bool(options.disaggregation_decode_enable_radix_cache))
