"""Joins one SGLang rank's tables of rooms and its bootstrap server with a `KVManager`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import sglang
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, KVTransferError, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode

from disagg.core import _native
from disagg.core.address import parse_address
from disagg.core.errors import ConfigError, DisaggError, LocalProtocolError, PeerUnreachable
from disagg.core.topology import Topology
from disagg.integrations.options import ServerConfig
from disagg.integrations.sglang.bootstrap import (
    MAX_MISSES,
    NO_RANK,
    BootstrapServers,
    Prefill,
    Served,
    control_address,
    name_of,
    named,
)
from disagg.integrations.sglang.host import Host, storage_option
from disagg.integrations.sglang.layout import components
from disagg.integrations.sglang.payload import MetadataBuffers
from disagg.integrations.sglang.rooms import Rooms
from disagg.integrations.sglang.rows import request_id
from disagg.layout.stages import join_stages
from disagg.manager import KVManager

logger = logging.getLogger(__name__)

ENGINE = f"sglang {sglang.__version__}"
ASK_AGAIN_S, WATCH_EVERY_S = 0.2, 2.0
"""How old a bootstrap server's answer is before a new request asks again, and how often waiting requests ask."""
COLLECT_EVERY_S, COLLECT_PAUSE, MAX_COLLECT_PAUSE_S = 200e-6, 10, 0.1
"""The pause between two collections, in seconds at least, in durations of the last one, and in seconds at most. The scheduler
polls every request in each step, and with many waiting senders polling must not dominate the step. A collection may take
seconds if the machine is busy.
"""
SWITCH_INTERVAL_S = 0.0005
"""SGLang's scheduler polls without a sleep, and gives the GIL away after this time only: 5 ms by Python's default.
"""
MAX_PREFILLS, MAX_HOST = 1024, 300


class Owner:
    """What senders and receivers share."""

    bootstrap_room: int
    conclude_state: Any
    clear: Callable[[], None]
    failure: str | None = None

    def failure_exception(self) -> None:
        self.conclude_state = KVPoll.Failed
        self.clear()
        reason = self.failure or "Failed due to an unknown reason from another rank"
        raise KVTransferError(self.bootstrap_room, reason, is_from_another_rank=self.failure is None)


class DisaggKVManager(CommonKVManager):  # type: ignore[misc]
    """One rank. `host` and `is_checked` are set before SGLang builds it. The latter is SGLang's option for checksums, which
    `DISAGG_VERIFY` overrides.

    `keeper` (on decode) and `taker` (on prefill) are set with the queue that SGLang builds after it.

    Every prefill rank registers rank 0's control address with the bootstrap server. Its host and port are also the
    instance's name.
    """

    supports_deferred_decode_kv_release = True
    supports_role_switch = True
    reports_transfer_latency = True
    host: ClassVar[Host]
    is_checked: ClassVar[bool] = False
    keeper: Any = None
    taker: Any = None
    local_ip: str
    rank_port: int
    attn_dp_rank: int

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        self.rooms = Rooms()
        self.waiting: dict[int, Any] = {}
        self.has_created = False
        self.held: dict[int, list[Any]] = {}
        self.bootstrap = BootstrapServers()
        self._served: dict[str, Served] = {}
        self._misses: dict[str, int] = {}
        self._located: set[str] = set()
        self._collect_at = self._watch_at = 0.0
        self.storage = storage_option(server_args)
        BootstrapServers.current = self.bootstrap
        if not server_args.log_requests:
            logging.getLogger("disagg.requests").setLevel(logging.WARNING)  # a line per request takes the scheduler's time
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.enable_deferred_decode_kv_release = True
        if disaggregation_mode == DisaggregationMode.DECODE:
            self._start()
        else:
            self.is_dummy_cp_rank = False  # context-parallel ranks have all tokens, and share the work

    def _start(self) -> None:
        """Build the `KVManager` at the port that SGLang has reserved for this rank's control messages."""
        args, host = self.kv_args, self.host
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._zmq_ctx.destroy(linger=0)
        own = control_address(self.local_ip, self.rank_port)
        leader = host.from_leader(own)
        topology = Topology(
            dp=self.attn_dp_size,
            pp=self.pp_size,
            cp=self.attn_cp_size,
            tp=self.attn_tp_size,
            dp_rank=self.attn_dp_rank,
            pp_rank=self.pp_rank,
            cp_rank=self.attn_cp_rank,
            tp_rank=self.attn_tp_rank,
        )
        self.facts = host.read_facts(topology)
        parts = join_stages(lambda: components(args, self.facts), topology=topology, gather=host.gather)
        config = ServerConfig.load(
            environ=os.environ, name=name_of(leader), listen=own, leader=None if own == leader else leader
        )
        if config.keys is not None:
            raise ConfigError("DISAGG_KEYS: expected none, since SGLang's bootstrap server cannot pass on public keys")
        if config.advertise is not None:
            raise ConfigError("DISAGG_ADVERTISE: expected none, since SGLang gives each rank its address; set SGLANG_HOST_IP")
        self.keep_s, self.kept_share = config.keep_s, config.kept_share
        given = config.manager_arguments()
        if self.is_checked and not os.environ.get("DISAGG_VERIFY"):
            given["verify"] = "full"
        self.transfers = KVManager(topology=topology, components=parts, model=host.model, **{**given, "admit": "any"})
        self.components = tuple(part.name for part in parts)
        self.metadata = MetadataBuffers(args.aux_data_ptrs, args.aux_item_lens, host.unread)
        self.leader = leader

    def register_to_bootstrap(self) -> None:
        """Register rank 0's address, on every rank. SGLang calls this while it builds prefill's manager."""
        self._start()
        self.local_ip, self.rank_port = parse_address(self.leader, what="leader")
        super().register_to_bootstrap()
        if self.system_dp_size > 1:  # replicas: SGLang's sender compares rooms with this
            self.attn_dp_rank = self.system_dp_rank

    def teardown(self) -> None:
        """SGLang calls this while no request is under way, then builds the other role's manager."""
        if self.keeper is not None:
            self.keeper.give_up_all()
        self.transfers.close()
        self.bootstrap.close()

    def check_request(self, request: Any) -> None:
        """Raise `LocalProtocolError` for a room or prefill address that would end SGLang's scheduler."""
        request_id(request.bootstrap_room)
        if self.disaggregation_mode != DisaggregationMode.DECODE:
            return
        host, port = request.bootstrap_host, request.bootstrap_port
        if not (isinstance(host, str) and 0 < len(host) <= MAX_HOST and isinstance(port, int) and 0 < port < 1 << 16):
            raise LocalProtocolError(
                f"bootstrap_host: expected a host of at most {MAX_HOST} characters and a port, "
                f"found {host!r:.80} and {port!r:.80}"
            )

    # -- rooms -------------------------------------------------------------------------------------------------------

    def check_status(self, bootstrap_room: int) -> Any:
        self.collect()
        return super().check_status(bootstrap_room)

    def check_status_pp_consensus(self, bootstrap_room: int) -> Any:
        self.collect()
        return super().check_status_pp_consensus(bootstrap_room)

    def collect(self) -> None:
        now = time.monotonic()
        if now < self._collect_at:
            return
        for event in self.transfers.events():
            owner = event.tag()
            if owner is not None and self._is_live(owner):
                owner.ended(event)
        self.has_created = False
        for sender in list(self.waiting.values()):
            sender.look()
        self._hear()
        self._watch()
        end = time.monotonic()
        self._collect_at = end + min(max(COLLECT_EVERY_S, COLLECT_PAUSE * (end - now)), MAX_COLLECT_PAUSE_S)

    def collect_created(self) -> None:
        """Collect, at once if senders were created: decode may have reserved, and the scheduler is about to choose a batch."""
        if self.has_created:
            _native.yield_gil(always=True)  # to the control thread, which opens their requests
            self._collect_at = 0.0
        self.collect()

    def _is_live(self, owner: Any) -> bool:
        return self.rooms.owns(owner.bootstrap_room, owner)

    def fail(self, room: int, error: Exception | str) -> None:
        self.record_failure(room, str(error))
        self.update_status(room, KVPoll.Failed)

    def leave(self, owner: Any) -> bool:
        """End the ownership of a room, and keep the failure's reason. Only if this returns True may SGLang's tables be
        cleared.
        """
        is_owner = self.rooms.leave(owner.bootstrap_room, owner)
        if is_owner:
            with self.failure_lock:
                owner.failure = self.failure_records.pop(owner.bootstrap_room, None)
        return is_owner

    def _fail_prefill_recompute(self, kv_receiver: Any, reason: str) -> None:
        """SGLang calls this in a thread, perhaps once the room has another owner."""
        if self._is_live(kv_receiver):
            super()._fail_prefill_recompute(kv_receiver, reason)

    # -- release of decode's pages -----------------------------------------------------------------------------------

    def hold(self, receiver: Any) -> None:
        self.held.setdefault(receiver.bootstrap_room, []).append(receiver)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing can write to the pages of this room's failed requests, on any pipeline stage."""
        held = self.held.get(bootstrap_room, ())
        return all(each.may_release if self.pp_size > 1 else each.is_drained for each in held)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        self.held.pop(bootstrap_room, None)

    # -- prefill instances, as decode finds them ---------------------------------------------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the instance is described. The handshake compares layouts."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        if named(bootstrap_addr) is not None:
            self._add_prefill_info(bootstrap_addr, PrefillServerInfo(**_ONE_RANK))
            return True
        self.bootstrap.ask(bootstrap_addr, is_known=bootstrap_addr in self._served)
        self._hear()
        return bootstrap_addr in self.prefill_info_table

    def _add_prefill_info(self, bootstrap_addr: str, info: Any) -> None:
        """If there are too many, forget the idle one that was named the longest time ago."""
        self._resolve_rank_mapping(info)
        self.prefill_info_table.pop(bootstrap_addr, None)
        self.prefill_info_table[bootstrap_addr] = info
        if len(self.prefill_info_table) > MAX_PREFILLS:
            idle = next((each for each in self.prefill_info_table if each not in self.addr_to_rooms_tracker), bootstrap_addr)
            self._serve(idle, None)

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Pretend that there is one rank: the plans decide which rank sends what."""
        info.target_tp_rank, info.target_tp_ranks, info.target_cp_ranks, info.target_pp_ranks = 0, [0], [0], [0]
        info.required_dst_info_num = info.required_prefill_response_num = 1

    def _hear(self) -> None:
        for server, found in self.bootstrap.answers():
            if isinstance(found, Served):
                self._misses.pop(server, None)
                self._serve(server, found)
                continue
            misses = self._misses[server] = self._misses.get(server, 0) + 1
            if server not in self._served or misses >= MAX_MISSES:
                logger.warning("%s", found)
                self._misses.pop(server)
                self._serve(server, None)

    def _serve(self, server: str, found: Served | None) -> None:
        """Requests of instances that a bootstrap server does not name any more fail. `None`: it is gone."""
        gone = self._served.pop(server, None)
        if found is None:
            self.prefill_info_table.pop(server, None)
        else:
            self._add_prefill_info(server, found.info)
            self._served[server] = found
        if gone is not None:
            named_still = {prefill.name for served in self._served.values() for prefill in served.prefills.values()}
            for name in {prefill.name for prefill in gone.prefills.values()} - named_still:
                self._located.discard(name)
                self.transfers.remove_peer(name)

    def locate(self, receiver: Any) -> Prefill:
        """Raises `DisaggError` without an instance for the receiver's request."""
        other = named(receiver.bootstrap_addr)
        if other is not None:
            return other
        if receiver.prefill_dp_rank == NO_RANK:
            raise PeerUnreachable(
                f"bootstrap server {receiver.bootstrap_addr} gives no data-parallel rank of room {receiver.bootstrap_room}"
            )
        served = self._served.get(receiver.bootstrap_addr)
        found = None if served is None else served.prefills.get(receiver.prefill_dp_rank)
        if found is None:
            raise PeerUnreachable(
                f"bootstrap server {receiver.bootstrap_addr} names no data-parallel rank {receiver.prefill_dp_rank}"
            )
        self._located.add(found.name)
        return found

    def check_dtype(self, server: str) -> None:
        """Raises `ConfigError` if an instance's cache has another dtype, and this server has a storage: SGLang's keys do not
        say which dtype a page has.
        """
        served = self._served.get(server)
        dtype = None if served is None else served.info.kv_cache_dtype
        if self.storage is not None and dtype not in (None, self.kv_cache_dtype_str):
            raise ConfigError(
                f"--kv-cache-dtype: expected {dtype} as at {server}, found {self.kv_cache_dtype_str}: with {self.storage} one "
                "server would read the other's pages as its own dtype"
            )

    def decline(self, receiver: Any) -> None:
        """Tell prefill, if it is known and was not replaced, that a request without a reservation is not wanted."""
        to = receiver.prefill or self._only_prefill(receiver.bootstrap_addr)
        if to is None:
            return
        served = self._served.get(receiver.bootstrap_addr)
        if served is not None and to not in served.prefills.values():
            return
        try:
            self._decline(receiver.bootstrap_room, to, receiver.attempt)
        except DisaggError as error:
            logger.warning("room %s: %s", receiver.bootstrap_room, error)

    def _decline(self, room: int, to: Prefill, attempt: int) -> None:
        self.transfers.decline(request_id(room), peer=to.name, address=to.address, group=to.group, attempt=attempt)

    def _only_prefill(self, server: str) -> Prefill | None:
        """The prefill instance behind a bootstrap server, if there is one only, as far as is known."""
        served = self._served.get(server)
        known = (named(server),) if served is None else tuple(served.prefills.values())
        return known[0] if len(known) == 1 else None

    def refused(self, request: Any) -> None:
        """Tell the other side of a request that ends before it has a sender or a receiver. Decode only knows whom to tell if
        its bootstrap server has one data-parallel rank.
        """
        room, reason = request.bootstrap_room, getattr(request.finished_reason, "message", "the request was refused")
        try:
            self.check_request(request)
            if self.rooms.is_taken(room):
                return
            if self.disaggregation_mode == DisaggregationMode.PREFILL:
                sender = self.transfers.sender(request_id(room), peer=None, attempt=None, deadline_s=None, tag=nobody)
                sender.abort(reason)
                return
            attempt = self.rooms.next_attempt(room)
            to = self._only_prefill(name_of(control_address(request.bootstrap_host, request.bootstrap_port)))
            if to is not None:
                self._decline(room, to, attempt)
        except DisaggError as error:
            logger.debug("room %r is refused, and nobody told: %s", room, error)

    def check_prefill(self, server: str) -> None:
        """Before a new request: have SGLang ask a bootstrap server again if an instance is not ready, since it may have been
        replaced. Answers from before are dropped if no other request is under way.
        """
        if len(self.rooms) == 1:
            self.bootstrap.forget_answers()
        info = self.prefill_info_table.pop(server, None)
        if info is not None:
            self.prefill_info_table[server] = info  # named last
        served = self._served.get(server)
        if served is not None and time.monotonic() - served.asked_s >= ASK_AGAIN_S and self._is_doubtful(served):
            self.prefill_info_table.pop(server, None)

    def _is_doubtful(self, served: Served) -> bool:
        """Whether an instance in use is not ready. This rank may never meet the others."""
        names = {prefill.name for prefill in served.prefills.values()} & self._located
        return any(self.transfers.peer(name).state != "ready" for name in names)

    def _watch(self) -> None:
        """An instance may have ended before its waiting requests met it."""
        now = time.monotonic()
        if now < self._watch_at:
            return
        self._watch_at = now + WATCH_EVERY_S
        for server, served in self._served.items():
            if self._is_doubtful(served):
                self.bootstrap.ask(server, is_known=True)
            else:
                self._misses.pop(server, None)


def nobody() -> None:
    """The owner of requests whose events nobody waits for."""


_ONE_RANK: Mapping[str, Any] = {
    "attn_tp_size": 1,
    "attn_cp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "page_size": None,
    "kv_cache_dtype": None,
    "follow_bootstrap_room": True,
}
