"""The worker half of the connector: one rank, with a manager over its KV cache."""

from __future__ import annotations

import logging
import math
import select
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.parallel_state import GroupCoordinator, get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from disagg.core.errors import ConfigError, DisaggError, LocalProtocolError
from disagg.core.events import ReadyEvent
from disagg.core.leases import Lease, LeaseState
from disagg.core.rows import Rows
from disagg.core.topology import Topology
from disagg.integrations.handoff import HandOff, Payload
from disagg.integrations.options import Options
from disagg.integrations.vllm.drafts import Drafts
from disagg.integrations.vllm.groups import Shapes, check_engine, read_groups, shapes_of
from disagg.integrations.vllm.identity import Scales, identify, read_source
from disagg.integrations.vllm.layout import Cache, rank_topology, read_caches
from disagg.integrations.vllm.metadata import BlockIds, Chunk, Finish, Load, Opening, RankAddress, StepMetadata, WorkerReport
from disagg.integrations.vllm.metrics import TransferStats
from disagg.integrations.vllm.neighbours import check_others
from disagg.integrations.vllm.transfers import Receive, Send, TransferResults
from disagg.layout.agreement import ModelId
from disagg.layout.placement import Component
from disagg.layout.stages import join_stages
from disagg.manager import KVManager
from disagg.protocol.types import Event
from disagg.requests import Sender

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.003
"""How long an idle step waits for a transfer to end: vLLM steps without a pause while a request waits.

With asynchronous scheduling vLLM takes a step's results only after the next one. So a step does not wait if the one before
computed or reported something.
"""

BLOCKED_S = 5.0
"""How long prefill and decode may keep blocks that the other needs."""

HEALTH_INTERVAL_S = 1.0


class WorkerHalf:
    def __init__(self, config: VllmConfig, kv: KVCacheConfig, options: Options) -> None:
        check_engine(config)
        self._config, self._kv, self._options = config, kv, options
        self._manager: KVManager | None = None
        self._trusted: frozenset[str] = frozenset()
        self._caches: tuple[Cache, ...] = ()
        self._leader: RankAddress | None = None
        self._is_cuda = False
        self._is_written = kv.needs_kv_cache_zeroing or _frees_early(config)
        """Whether earlier steps may still write a load's blocks: vLLM clears some, and in some roles frees others too early.
        Inside `MultiConnector` the role is unknown.
        """
        self._sends: dict[str, Send] = {}
        self._receives: dict[str, Receive] = {}
        self._results = TransferResults()
        self._read: list[tuple[Send, Lease]] = []
        """Ended sends whose blocks a copy may still read."""
        self._ended: Counter[str] = Counter()
        """Kept requests whose blocks are not read any more."""
        self._may_wait = False
        """Whether the last step neither computed nor reported anything."""
        self._leases: Counter[str] = Counter()
        self._released: deque[str] = deque()
        """Loads that the server ended, whose blocks are not written any more."""
        self._stats = TransferStats()
        self._nbytes = 0
        self._transport = ""
        self._health_due_s = 0.0
        self._blocked_since_s, self._looked_s = math.inf, 0.0
        self._scales: Scales | None = None
        """The scales that peers know."""
        self._refusal = ""

    # -- start and end -------------------------------------------------------------------------------------------------

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start the manager. Rank 0's starts first, since the others need its address. Raises `ConfigError` for an engine
        that cannot be served, and what `KVManager` raises.
        """
        tp, pp = get_tp_group(), get_pp_group()
        topology = rank_topology(self._config.parallel_config, tp_rank=tp.rank_in_group, pp_rank=pp.rank_in_group)
        name = self._options.model
        source = read_source(self._config, name=name)
        self._scales = Scales(self._config)
        drafts = Drafts(self._config, self._kv)

        stages = _from_stages(self._shapes(drafts, topology))

        def describe() -> list[Component]:
            self._caches = read_caches(
                self._config, self._kv, tensors, topology, model=source.config, drafts=drafts, from_tp=_from_tp, stages=stages
            )
            return [cache.component for cache in self._caches]

        components = join_stages(describe, topology=topology, gather=_from_stages)
        self._is_cuda = any(tensor.is_cuda for tensor in tensors.values())
        groups = drafts.target(read_groups(self._kv))
        identity = identify(self._config, groups, source, name=name, from_stages=_from_stages, from_tp=_from_tp)
        leader = self._start(components, topology, identity, None) if topology.rank == 0 else None
        leader = tp.broadcast_object(pp.broadcast_object(leader) if tp.rank_in_group == 0 else None)
        if topology.rank != 0:
            self._start(components, topology, identity, leader)
        self._leader = leader

    def _shapes(self, drafts: Drafts, topology: Topology) -> Shapes:
        num_layers = self._config.model_config.get_total_num_hidden_layers()
        try:
            return shapes_of(drafts.target(read_groups(self._kv, dcp=topology.cp)), num_layers=num_layers)
        except ConfigError:  # raised again by `read_caches`, with the other stages
            return None

    def _start(
        self, components: Sequence[Component], topology: Topology, model: ModelId, leader: RankAddress | None
    ) -> RankAddress:
        if isinstance(group := get_kv_transfer_group(), MultiConnector):
            outer = group._kv_transfer_config
            check_others(group.sub_connectors, recomputes=outer.kv_load_failure_policy == "recompute")
        replica = self._config.parallel_config.data_parallel_index
        listen = self._options.listen_on(rank=topology.rank, dp_rank=replica)
        to_join = None if leader is None else leader.address
        settings = self._options.rank_settings(listen=listen, leader=to_join, dp_rank=replica)
        self._manager = manager = KVManager(topology=topology, components=components, model=model, **settings)
        self._trusted = frozenset(settings["peer_keys"].values())
        keys = settings["keys"]
        is_alone = not isinstance(group, MultiConnector)
        self._is_written |= not is_alone
        return RankAddress(manager.name, manager.address, None if keys is None else keys.public, is_alone)

    @property
    def address(self) -> RankAddress | None:
        """The instance's address; `None` on later pipeline stages, since vLLM shows all addresses to every connector beside
        this one, and others refuse those of later stages.
        """
        return self._leader if get_pp_group().is_first_rank else None

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()

    # -- each step -----------------------------------------------------------------------------------------------------

    def begin(self, step: StepMetadata) -> None:
        """Start loads and stop aborted requests. Decode can reserve a request once it is opened."""
        self._check_scales()
        for opening in step.openings:
            act = partial(self._give_up, opening.request_id) if self._refusal else partial(self._opened, opening)
            self._attempt(act, opening.req_id)
        for req_id in step.aborts:
            self._abort(req_id, is_held=req_id in step.held)
        for request_id in step.given_up:
            self._attempt(partial(self._give_up, request_id), request_id.hex())
        for hand_off in step.declines:
            self._attempt(partial(self._decline, hand_off), hand_off.remote_request_id)
        for hand_off in step.wanted:
            self._attempt(partial(self._want, hand_off), hand_off.remote_request_id)
        for load in step.loads:
            self._receives[load.req_id] = receive = Receive(load.req_id, load.stop - load.start, load.stop, load.prompt)
            if not self._attempt(partial(self._receive, load, receive), load.req_id):
                self._end_receive(receive, ok=False)
        for req_id in step.unloadable:
            self._receives[req_id] = receive = Receive(req_id, 0, 0, "")
            self._end_receive(receive, ok=False)

    def _check_scales(self) -> None:
        """End all transfers once new weights have other scales of K and V: peers convert with the old ones."""
        if self._refusal or self._scales is None or not self._scales.have_changed():
            return
        self._refusal = "the scales of K and V have changed with the weights: restart the server"
        self._stats.count_death()
        logger.error("this rank transfers nothing any more: %s", self._refusal)
        transfers: list[Send | Receive] = [*self._sends.values(), *self._receives.values()]
        for transfer in transfers:
            if transfer.handle is not None:
                transfer.handle.abort(self._refusal)

    def save(self, step: StepMetadata, *, has_failed: bool = False) -> None:
        """Nothing of a step that `has_failed` is handed over: some layers were not computed."""
        ready = _recorded_event() if self._is_cuda and not has_failed and (step.chunks or step.finishes) else None
        for chunk in step.chunks:
            if has_failed:
                self._abort_send(chunk.req_id, "the step that computes it has failed")
            else:
                self._attempt(partial(self._send, chunk, ready), chunk.req_id)
        for finish in step.finishes:
            if has_failed or not self._attempt(partial(self._finish, finish, ready), finish.req_id):
                self._abort_send(finish.req_id, "it could not be finished")
        for req_id in step.held:
            if req_id not in step.aborts:
                self._hold(req_id)
        for req_id in step.kept:
            self._hold(req_id, is_kept=True)

    def results(self, *, idle: bool) -> TransferResults:
        manager = self._running()
        self._end_late_sends()
        self._end_blocking_send(idle=idle)
        self._end_unreachable()
        self._give_back_read()
        if (
            idle
            and self._may_wait
            and self._config.parallel_config.data_parallel_size == 1  # replicas of a mixture of experts step together
            and (self._sends or self._receives or self._read)
            and not self._results.finished_sending | self._results.finished_recving
        ):
            poll = select.poll()  # `select.select` refuses descriptors from 1,024 on
            poll.register(manager, select.POLLIN)
            poll.poll(IDLE_WAIT_S * 1000)
        for event in manager.events():
            transfer = event.tag()
            if isinstance(transfer, Send):
                self._sent(transfer, event)
            elif transfer is not None:
                self._received(transfer, event)
        results, self._results = self._results, TransferResults()
        self._may_wait = idle and not results.finished_sending | results.finished_recving
        return results

    def report(self) -> WorkerReport | None:
        while self._released:
            self._leases[self._released.popleft()] -= 1
        leases, self._leases = self._leases, Counter()
        ended, self._ended = self._ended, Counter()
        return WorkerReport(leases, ended) if leases or ended else None

    def take_stats(self) -> TransferStats | None:
        self._check_health()
        nbytes = self._running().stats.nbytes
        self._stats.count_bytes(nbytes - self._nbytes)
        self._nbytes = nbytes
        stats, self._stats = self._stats, TransferStats()
        return None if stats.is_empty() else stats

    def _check_health(self) -> None:
        """Report once that the manager has ended. Every later transfer fails, and vLLM computes the request."""
        if time.monotonic() < self._health_due_s:
            return
        health = self._running().health()
        self._health_due_s = time.monotonic() + HEALTH_INTERVAL_S if health.ok else math.inf
        if not health.ok:
            self._stats.count_death()
            logger.error("this rank transfers nothing until the server is restarted: %s", health.problem)

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _send(self, chunk: Chunk, ready: ReadyEvent | None) -> None:
        rows = self._rows(chunk.blocks, start=chunk.start, incremental=True)
        self._sender(self._opened(chunk)).send(rows, tokens=(chunk.start, chunk.stop), ready=ready)

    def _finish(self, finish: Finish, ready: ReadyEvent | None) -> None:
        rows = self._rows(finish.blocks, start=0, incremental=False)
        self._sender(self._opened(finish)).finish(rows, payload=finish.payload, ready=ready)

    def _hold(self, req_id: str, *, is_kept: bool = False) -> None:
        """Until the end is reported vLLM holds the blocks, or the scheduler half those of a kept request."""
        send = self._sends.setdefault(req_id, Send(req_id, 0))
        send.is_kept = is_kept
        if send.handle is None:
            del self._sends[req_id]
            self._report_end(send)
            return
        send.finished_s = time.monotonic()
        self._report_read(send)

    def _report_read(self, send: Send) -> None:
        """If an ended send's blocks are held, report its end once nothing reads them."""
        if send.finished_s is not None and send.lease is not None:
            del self._sends[send.req_id]
            self._read.append((send, send.lease))
            self._give_back_read()

    def _report_end(self, send: Send) -> None:
        if send.is_kept:
            self._ended[send.req_id] += 1
        else:
            self._results.finished_sending.add(send.req_id)

    def _opened(self, part: Opening | Chunk | Finish) -> Send:
        """A new attempt ends the one before, whose blocks vLLM has taken away. Raises `ConfigError` on a rank that transfers
        nothing.
        """
        if self._refusal:
            raise ConfigError(self._refusal)
        send = self._sends.get(part.req_id)
        if send is None or send.attempt != part.attempt:
            self._abort(part.req_id)
            self._sends[part.req_id] = send = Send(part.req_id, part.attempt)
            send.handle = self._running().sender(
                part.request_id, peer=None, attempt=part.attempt, deadline_s=None, tag=weakref.ref(send), label=part.req_id
            )
        return send

    def _sender(self, send: Send) -> Sender:
        """Raises `LocalProtocolError` if it was not opened, or has ended."""
        if send.handle is None or send.lease is not None:
            raise LocalProtocolError("an earlier part of the request could not be sent")
        return send.handle

    def _end_late_sends(self) -> None:
        """End requests that no server took in time. One that is still wanted, or being taken, has longer."""
        now, options = time.monotonic(), self._options
        for send in self._sends.values():
            if send.finished_s is None or send.handle is None:
                continue
            hold_s = options.keep_s if send.is_kept else options.hold_s
            wanted_s = max(send.finished_s, send.handle.wanted_at or 0.0)
            most_s = send.finished_s + max(options.max_hold_s, hold_s)
            if (most_s if send.handle.readers else min(wanted_s + hold_s, most_s)) < now:
                reason = f"no server has taken it within {now - send.finished_s:.0f} s"
                send.finished_s = math.inf  # only once
                send.handle.abort(reason)

    def _end_blocking_send(self, *, idle: bool) -> None:
        """End a request that waits for decode while decode waits too: each holds blocks for requests that the other has none
        for.
        """
        sends = [(send.finished_s, send.handle) for send in self._sends.values() if send.handle and send.lease is None]
        held = [(since_s, handle) for since_s, handle in sends if since_s is not None and handle.readers is None]
        is_wanted = any(since_s is None and handle.readers for since_s, handle in sends)
        now = time.monotonic()
        looked_s, self._looked_s = self._looked_s, now
        if not (idle and held and is_wanted):
            self._blocked_since_s = math.inf
            return
        stood_still = now - looked_s > BLOCKED_S / 5
        self._blocked_since_s = now if stood_still else min(self._blocked_since_s, now)
        if now > self._blocked_since_s + BLOCKED_S:
            self._blocked_since_s = now
            _, oldest = min(held, key=lambda each: each[0])
            oldest.abort("decode has reserved other requests, for which prefill needs its blocks")

    def _give_up(self, request_id: bytes) -> None:
        """End a request that will not be sent, and refuse it to decode, which may already wait."""
        handles = [send.handle for send in self._sends.values() if send.handle and send.handle.request_id == request_id]
        if not handles:
            handles.append(self._running().sender(request_id, peer=None, deadline_s=None, tag=_untracked))
        for handle in handles:
            handle.abort("prefill does not hand the request over, or the proxy has given it up")

    def _sent(self, send: Send, event: Event) -> None:
        if self._sends.get(send.req_id) is not send:
            return
        if not event.ok and send.is_kept and (send.handle is None or send.handle.readers is None):
            logger.debug("request %s: it is kept no more: %s", send.req_id, event.error)
            self._end_send(send, event)
            return
        self._stats.count_send(ok=event.ok)
        if not event.ok:
            logger.warning("request %s: the other server did not get its state: %s", send.req_id, event.error)
        elif (backend := self._running().backend).transport != self._transport:
            self._transport = backend.transport
            logger.info("requests are written to decode by %s over %s", backend.name, self._transport)
        self._end_send(send, event)

    def _end_send(self, send: Send, event: Event) -> None:
        send.lease = event.lease
        self._report_read(send)

    def _abort_send(self, req_id: str, reason: str) -> None:
        send = self._sends.get(req_id)
        if send is not None and send.handle is not None:
            send.handle.abort(reason)

    def _give_back_read(self) -> None:
        """Report sends whose blocks are not read any more, or quarantined: decode takes nothing of those."""
        read, self._read = self._read, []
        for send, lease in read:
            if lease.state is LeaseState.HELD:
                self._read.append((send, lease))
            else:
                self._report_end(send)

    # -- decode --------------------------------------------------------------------------------------------------------

    def _receive(self, load: Load, receive: Receive) -> None:
        if self._refusal:
            self._decline(load.hand_off)
            raise ConfigError(self._refusal)
        receive.handle = self._running().receiver(
            load.hand_off.request_id,
            **self._source(load.hand_off),
            rows=self._rows(load.blocks, start=0, incremental=None),
            need={cache.name: load.needs[cache.group.index] for cache in self._caches},
            ready=_recorded_event() if self._is_cuda and self._is_written else None,
            deadline_s=self._options.max_hold_s if load.hand_off.remote_num_tokens is None else self._options.load_timeout_s,
            tag=weakref.ref(receive),
            label=load.req_id,
        )

    def _decline(self, hand_off: HandOff) -> None:
        self._running().decline(hand_off.request_id, **self._source(hand_off))

    def _want(self, hand_off: HandOff) -> None:
        self._running().want(hand_off.request_id, **self._source(hand_off))

    def _source(self, hand_off: HandOff) -> dict[str, Any]:
        """With keys only trusted servers are accepted, since a client's request may name any address. Raises `ConfigError`."""
        key = hand_off.remote_public_key
        if self._trusted and key not in self._trusted:
            raise ConfigError(f"prefill server {hand_off.remote_engine_id!r}: expected one of trusted_keys, found {key!r}")
        return {
            "peer": hand_off.remote_engine_id,
            "address": hand_off.remote_address,
            "public_key": key if self._trusted else None,
            "attempt": hand_off.remote_attempt,
        }

    def _end_unreachable(self) -> None:
        """End loads from servers that do not answer. One that has answered may take as long as its queue."""
        limit_s = self._options.load_timeout_s
        for receive in self._receives.values():
            is_late = time.monotonic() > receive.begun_s + limit_s
            if is_late and receive.handle is not None and receive.handle.session is None:
                receive.handle.abort(f"the prefill server did not answer within {limit_s:g} s")

    def _received(self, receive: Receive, event: Event) -> None:
        if not event.ok:
            logger.warning("request %s: its state did not arrive: %s", receive.req_id, event.error)
            if not event.lease.released:
                self._leases[receive.req_id] += 1
                event.lease.on_release(lambda: self._released.append(receive.req_id))
        is_ok = event.ok and not self._refusal
        self._end_receive(receive, ok=is_ok and self._attempt(partial(_check_prompt, receive, event), receive.req_id))

    def _end_receive(self, receive: Receive, *, ok: bool) -> None:
        del self._receives[receive.req_id]
        if not receive.has_ended:
            self._stats.count_load(ok=ok, num_tokens=receive.num_tokens, seconds=time.monotonic() - receive.begun_s)
        self._results.finished_recving.add(receive.req_id)
        if not ok:
            self._results.failed_recving.add(receive.req_id)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _rows(self, blocks: BlockIds, *, start: int, incremental: bool | None) -> dict[str, Rows]:
        return {
            cache.name: cache.rows(blocks[cache.group.index], start=start)
            for cache in self._caches
            if incremental is None or cache.group.is_incremental is incremental
        }

    def _abort(self, req_id: str, *, is_held: bool = False) -> None:
        """A load is still reported; a send only if vLLM holds its blocks."""
        receive = self._receives.get(req_id)
        self._abort_send(req_id, "the server ended the request")
        if is_held:
            self._hold(req_id)
        else:
            self._sends.pop(req_id, None)
        if receive is not None:
            receive.has_ended = True
            if receive.handle is not None:
                receive.handle.abort("the server ended the request")

    def _attempt(self, act: Callable[[], object], req_id: str) -> bool:
        """A failure costs only its request the transfer."""
        try:
            act()
        except DisaggError as error:
            logger.warning("request %s: %s", req_id, error)
            return False
        except Exception:
            logger.exception("request %s: it cannot be transferred", req_id)  # one request must not end the server
            return False
        return True

    def _running(self) -> KVManager:
        assert self._manager is not None, "register_kv_caches comes first"
        return self._manager


def _from_stages(own: Any) -> list[Any]:
    return _from_group(get_pp_group(), own)


def _from_tp(own: Any) -> list[Any]:
    return _from_group(get_tp_group(), own)


def _from_group(group: GroupCoordinator, own: Any) -> list[Any]:
    if group.world_size == 1:
        return [own]
    found = [None] * group.world_size
    torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


def _untracked() -> None:
    """The tag of a transfer whose end is not reported."""


def _check_prompt(receive: Receive, event: Event) -> None:
    """Raise `RemoteProtocolError` for another prompt's state: decode may ask before prefill has named the prompt."""
    payload = Payload.decode(event.payload)
    payload.check(payload.digest(receive.stop), receive.prompt)


def _frees_early(config: VllmConfig) -> bool:
    """Whether an ended request's blocks go to others while a step still writes them. vLLM 0.32 prevents that, except on
    servers that only produce, and for the draft model of its second model runner, which reports a step before that.
    """
    overlaps = config.scheduler_config.async_scheduling or config.parallel_config.pipeline_parallel_size > 1
    drafts_late = config.speculative_config is not None and config.use_v2_model_runner
    assert config.kv_transfer_config is not None
    return bool(overlaps) and (drafts_late or not config.kv_transfer_config.is_kv_consumer)


def _recorded_event() -> ReadyEvent:
    """An event after the step's work on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event  # type: ignore[no-any-return]
