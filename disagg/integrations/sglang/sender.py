"""The sender of one request on one prefill rank."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender

from disagg.core.errors import DisaggError
from disagg.integrations.handoff import Payload
from disagg.integrations.sglang.bootstrap import control_address, name_of
from disagg.integrations.sglang.manager import ENGINE, Owner
from disagg.integrations.sglang.prompts import Prompt
from disagg.integrations.sglang.rooms import taken
from disagg.integrations.sglang.rows import full_pages, request_id, scale_blocks, state_rows
from disagg.protocol.types import Event
from disagg.requests import Sender


class DisaggKVSender(Owner, CommonKVSender):  # type: ignore[misc]
    """Serves whichever decode instance reserves the room, and waits in `Bootstrapping` until all its ranks have. `prompt` is
    set once SGLang has created the sender.
    """

    handle: Sender | None = None
    prompt: Prompt
    _early_send_wait_event: Any
    _transfer_start_time: float | None

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        key = mgr.rooms.enter(bootstrap_room, self)
        is_taken = key != bootstrap_room
        super().__init__(mgr, bootstrap_addr, key, req_has_disagg_prefill_dp_rank or is_taken)
        self.next_token = 0
        if is_taken:
            mgr.fail(key, taken(bootstrap_room))
            self.conclude_state = KVPoll.Failed
        if mgr.request_status.get(key) != KVPoll.Bootstrapping:
            return
        label = f"room {bootstrap_room}"
        try:
            self.handle = mgr.transfers.sender(
                request_id(bootstrap_room), peer=None, attempt=None, deadline_s=None, tag=weakref.ref(self), label=label
            )
        except DisaggError as error:
            mgr.fail(bootstrap_room, error)
        else:
            mgr.waiting[bootstrap_room] = self
            mgr.has_created = True

    def _register_prefill_dp_rank(self) -> None:
        """SGLang would wait here for the server, which clients choose. Their IPv6 addresses may have no brackets."""
        host, _, port = self.bootstrap_server_url.rpartition(":")
        server = name_of(control_address(host, port))
        self.kv_mgr.bootstrap.tell_rank(server, self.bootstrap_room, self.kv_mgr.attn_dp_rank)

    def look(self) -> None:
        """Go on to `WaitingForInput` once decode has reserved: then it is known which tokens it already has."""
        mgr, room, handle = self.kv_mgr, self.bootstrap_room, self.handle
        if handle is None or handle.readers is None:
            return
        found = {name: handle.needed(name) for name in mgr.components}
        if handle.is_declined:
            del mgr.waiting[room]
            mgr.fail(room, "decode does not want the request")
            return
        if handle.readers and all(need is None for need in found.values()):
            return
        del mgr.waiting[room]
        in_blocks = scale_blocks(mgr.facts)  # decode needs whole ones
        num_tokens = max((need[1] for name, need in found.items() if need and name not in in_blocks), default=0)
        if num_tokens > self.prompt.num_tokens:
            # If decode has cached more than this prompt, SGLang would never send the last chunk.
            reason = f"prompt: expected {num_tokens} tokens, as on decode, found {self.prompt.num_tokens} on prefill"
            mgr.fail(room, reason)
            self._end(reason)
            return
        full = {mgr.facts.kv_name(layer) for layer in mgr.facts.kv.layers} if mgr.facts.kv is not None else set()
        first_token = min((need[0] for name, need in found.items() if need and name in full), default=0)
        mgr.req_to_decode_prefix_len[room] = first_token // mgr.kv_args.page_size * mgr.kv_args.page_size
        mgr.update_status(room, KVPoll.WaitingForInput)

    def pop_decode_prefix_len(self) -> int:
        self.next_token = int(super().pop_decode_prefix_len())
        return self.next_token

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Send the next tokens. The last chunk has a list of state indices, perhaps an empty one."""
        if self.conclude_state is not None or self.handle is None:
            return
        mgr, start = self.kv_mgr, self.next_token
        stop = self.next_token = start + (len(kv_indices) * mgr.kv_args.page_size if num_kv_tokens is None else num_kv_tokens)
        ready, self._early_send_wait_event = self._early_send_wait_event, None
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        try:
            mgr.host.check_scales()
            rows = full_pages(np.asarray(kv_indices), start, facts=mgr.facts)
            if rows and start < stop:
                self.handle.send(rows, tokens=(start, stop), ready=ready)
            if state_indices is not None:
                kinds, page_size = mgr.kv_args.state_types, mgr.kv_args.page_size
                states = state_rows(kinds, state_indices, num_tokens=stop, page_size=page_size, facts=mgr.facts)
                payload = Payload(
                    engine=ENGINE,
                    num_tokens=stop,
                    native=mgr.metadata.read(self.aux_index),
                    prompt=self.prompt.digest(stop - 1),
                    whole_prompt=self.prompt.digest(stop),
                )
                self.handle.finish(states, payload=payload.encode())
                mgr.update_status(self.bootstrap_room, KVPoll.Transferring)
        except DisaggError as error:
            mgr.fail(self.bootstrap_room, error)
            self.handle.abort(str(error))
        self._record_transfer_indices(kv_indices, state_indices)

    def get_transfer_metric(self) -> Any:
        """Each decode rank that this one writes to has all latents."""
        if self.kv_mgr.is_mla_backend and self.handle is not None:
            self.kv_mgr._kv_replica_factor = max(1, len(self.handle.readers or ()))
        return super().get_transfer_metric()

    def ended(self, event: Event) -> None:
        if event.ok and self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Transferring:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self.kv_mgr.fail(self.bootstrap_room, event.error or "the request ended before it was sent")

    def abort(self) -> None:
        """End the request and free its room: SGLang does not clear every sender that it aborts."""
        if not self.kv_mgr.rooms.owns(self.bootstrap_room, self):
            return
        self._end("aborted by prefill's scheduler")
        if self.conclude_state != KVPoll.Failed:
            super().abort()
        self.clear()

    def clear(self) -> None:
        """SGLang then reuses the pages on all ranks, although copies may still read them: after `_end` decode takes nothing
        of them.
        """
        if self.kv_mgr.leave(self):
            super().clear()
            self.kv_mgr.waiting.pop(self.bootstrap_room, None)
            self._end("prefill has given up the request")

    def _end(self, reason: str) -> None:
        if self.handle is not None and self.handle.poll() is None:
            self.handle.abort(reason)
