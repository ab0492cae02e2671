"""The receiver of one request on one decode rank."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from disagg.core.errors import DisaggError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.integrations.handoff import Payload
from disagg.integrations.sglang.bootstrap import Prefill
from disagg.integrations.sglang.manager import ENGINE, Owner
from disagg.integrations.sglang.rooms import taken
from disagg.integrations.sglang.rows import full_pages, needs, request_id, state_rows
from disagg.protocol.types import Event
from disagg.requests import Receiver

FAILURES = (DisaggError, RuntimeError, ValueError)
"""These end one request, not the scheduler. NumPy and PyTorch raise some of them for a peer's data."""


class DisaggKVReceiver(Owner, CommonKVReceiver):  # type: ignore[misc]
    """Reserves a room's pages at the instance that the bootstrap server names."""

    handle: Receiver | None = None
    prefill: Prefill | None = None
    bootstrap_infos: list[dict[str, Any]] | None = None
    aux_index: int | None = None
    declined = False
    may_release = False
    """Whether the pipeline stages have agreed that nothing can write to the pages."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        key = mgr.rooms.enter(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, key)
        if key != bootstrap_room:
            mgr.fail(key, taken(bootstrap_room))
            self.conclude_state, self.declined = KVPoll.Failed, True
            return
        mgr.check_prefill(bootstrap_addr)
        self.attempt = mgr.rooms.next_attempt(bootstrap_room)

    def _setup_bootstrap_infos(self) -> None:
        """SGLang's `init`, for which `bootstrap_infos` must not be empty once the instance is found."""
        try:
            self.prefill = self.kv_mgr.locate(self)
            self.kv_mgr.check_dtype(self.bootstrap_addr)
        except DisaggError as error:
            self.kv_mgr.fail(self.bootstrap_room, error)
            self.conclude_state = KVPoll.Failed
        else:
            self.bootstrap_infos = [{"address": self.prefill.address, "is_dummy": False}]

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: str = "device",
        device_kv_indices: Any = None,
    ) -> None:
        """Reserve pages, for the tokens from `decode_prefix_len` on, and rows of state."""
        mgr, prefix = self.kv_mgr, decode_prefix_len or 0
        if self.prefill is None or destination != "device" or device_kv_indices is not None:
            mgr.fail(self.bootstrap_room, "expected pages of the device's own pools, after init()")
            return
        self.aux_index, self.prompt = aux_index, mgr.host.prompt(mgr.host.request(self))
        kinds, page_size, num_tokens = mgr.kv_args.state_types, mgr.kv_args.page_size, self.prompt.num_tokens
        try:
            if prefix and (self.prompt.embeddings is not None or self.prompt.replaced is not None):
                raise LocalProtocolError("expected no cached prefix for embeddings: SGLang has found that of the token ids")
            if mgr.locate(self) != self.prefill:
                raise PeerUnreachable(f"prefill instance {self.prefill.name} was replaced while the request waited for pages")
            rows = full_pages(np.asarray(kv_indices), prefix, facts=mgr.facts)
            rows |= state_rows(kinds, state_indices, num_tokens=num_tokens, prefix=prefix, page_size=page_size, facts=mgr.facts)
            self.handle = mgr.transfers.receiver(
                request_id(self.bootstrap_room),
                peer=self.prefill.name,
                address=self.prefill.address,
                group=self.prefill.group,
                attempt=self.attempt,
                rows=rows,
                need=needs(rows, num_tokens=num_tokens, prefix=prefix, facts=mgr.facts),
                ready=mgr.host.launched(),
                deadline_s=None,
                tag=weakref.ref(self),
                label=f"room {self.bootstrap_room}",
            )
        except FAILURES as error:
            mgr.fail(self.bootstrap_room, error)
        else:
            self.init_time = time.time()

    def ended(self, event: Event) -> None:
        if not event.ok:
            self.kv_mgr.fail(self.bootstrap_room, event.error or "the transfer failed")
            return
        try:
            self.kv_mgr.host.check_scales()
            self._take(Payload.decode(event.payload))
        except FAILURES as error:
            self.kv_mgr.fail(self.bootstrap_room, error)
        else:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)

    def _take(self, payload: Payload) -> None:
        num_tokens = self.prompt.num_tokens
        if payload.num_tokens != num_tokens:
            raise RemoteProtocolError(f"prompt: expected {num_tokens} tokens, found {payload.num_tokens} on prefill")
        payload.check(payload.whole_prompt, self.prompt.digest(num_tokens))
        if payload.engine == ENGINE and payload.native:
            self.kv_mgr.metadata.write(self.aux_index, payload.native)
            self.kv_mgr.host.check_metadata(self.aux_index, self.bootstrap_room)
        elif payload.first_token is None:
            raise RemoteProtocolError(f"payload: expected rows of {ENGINE} or a first token, found none from {payload.engine}")
        else:
            self.kv_mgr.host.write_first_token(self.aux_index, payload.first_token, self.bootstrap_room)

    @property
    def is_drained(self) -> bool:
        return self.handle is None or self.handle.lease.released

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """End the request, here and on prefill. If it has pages, SGLang then waits for `is_abort_release_safe`, even on
        ranks that could not reserve: all must release together.
        """
        if self.aux_index is not None:
            super().ensure_abort_notified(force_arm=force_arm)
        self._decline()

    def _decline(self) -> None:
        if self.handle is None and not self.declined:
            self.declined = True
            self.kv_mgr.decline(self)

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        self.kv_mgr.hold(self)
        if self.handle is not None:
            self.handle.abort("aborted by decode's scheduler")

    def _clear(self) -> None:
        if self.kv_mgr.leave(self):
            self._decline()
            super()._clear()
            if not self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr]:
                del self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr]
