"""`KVManager`: what a server embeds. It checks what the server says, in the server's thread, and leaves the rest to `hub`."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from disagg.backends import registry as backends
from disagg.backends.abilities import QuietWhenClosed
from disagg.backends.base import Backend, BackendOptions, RemotePeer, Transport
from disagg.core import _native
from disagg.core.address import advertised_address, is_loopback, is_wildcard, parse_address
from disagg.core.errors import Cause, ConfigError, DisaggError, LocalProtocolError, PeerUnreachable, RequestAborted
from disagg.core.events import ReadyEvent
from disagg.core.leases import Lease, LeaseState
from disagg.core.memory import merge_regions
from disagg.core.rows import MAX_TOKEN, Pages, Rows, Slot, token_range
from disagg.core.topology import Topology
from disagg.layout.agreement import Agreement, LocalRank, ModelId
from disagg.layout.binding import check_rows
from disagg.layout.placement import Component
from disagg.protocol.messages import TokenRange, Verify
from disagg.protocol.peer_state import ConnectionLimits, Identity
from disagg.protocol.peers import PeerTable
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, Limits, PeerRank, RequestKey
from disagg.requests import Receiver, Sender
from disagg.runtime.accounting import HeldSize, RequestRecord, Session, Work, account, quarantined, states, wanted
from disagg.runtime.breakeven import BreakEven, Threshold
from disagg.runtime.channel import Channel
from disagg.runtime.credits import Packing
from disagg.runtime.handshake import Handshake
from disagg.runtime.keys import KeyPair, check_key
from disagg.runtime.loop import Hub, Stats, Wire
from disagg.runtime.metrics import Metrics, MetricsServer, Snapshot
from disagg.transfer.pool_memory import PoolMemory
from disagg.transfer.staging import RingPool, SlotPool

logger = logging.getLogger(__name__)


def new_request_id() -> bytes:
    """A request id that no other request has: 128 random bits."""
    return secrets.token_bytes(16)


@dataclass(frozen=True)
class PeerHealth:
    """One configured peer: whether all its ranks are ready, and if not, why; and towards each rank that is connected, below
    which size pieces travel packed.
    """

    ready: bool
    problem: str
    pack_below: Mapping[int, Threshold] = field(default_factory=dict)


@dataclass(frozen=True)
class Health:
    """What `KVManager.health()` says. `ok` is false for good once a thread of the manager has died, or it was closed.

    `quarantined` counts requests whose rows are not proved quiet, by reason. Where there are more than
    `Limits.max_quarantined`, `renewal_due` says so: close this manager and build another over the same pools, since the end
    of an engine is a proof for most.
    """

    ok: bool
    problem: str
    peers: dict[str, PeerHealth]
    num_receiving: int
    num_sending: int
    quarantined: dict[str, int]
    renewal_due: str = ""


class KVManager:
    """One rank's transfers. Every call returns at once; work happens in two supervised threads.

    `name` names the instance, and is the same on all its ranks; `leader` is the control address of rank 0, which answers
    for the instance (`None` on rank 0 itself). `listen` is this rank's control address, `tcp://host:port`; where that is
    every interface, `advertise` says which address peers use. Its host is also where the engine is reached. Off loopback
    it takes `keys`, or `insecure=True`; an engine with an open TCP data plane takes `trusted_network=True` as well. Pieces
    below `pack_below` bytes travel packed (0: never; `None`: as measured towards each peer, or as is known of the engine).
    What this rank receives is compared with what its writers sent as `verify` says: `"off"`, some pages of each request
    (`"sample"`), or `"full"`. With `metrics_port` (0: any) Prometheus metrics are served at `metrics_url`, to whoever reaches
    `metrics_host`.

    Raises `ConfigError` for settings that cannot be, `BackendUnavailable` where the engine cannot be used.
    """

    def __init__(
        self,
        *,
        name: str,
        topology: Topology,
        components: Sequence[Component],
        model: ModelId,
        backend: str | Callable[[BackendOptions], Backend] = "auto",
        listen: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        leader: str | None = None,
        keys: KeyPair | None = None,
        insecure: bool = False,
        trusted_network: bool = False,
        transport: str = "auto",
        devices: Sequence[str] = (),
        require: str | None = None,
        pack_below: int | None = None,
        verify: Verify = "off",
        limits: Limits | None = None,
        connection_limits: ConnectionLimits | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
    ) -> None:
        self.name, self.topology = name, topology
        self._local = LocalRank.of(topology, components)
        self._verify = _check_verify(verify)
        options = _options(listen, advertise, transport, devices, require, trusted_network)
        if leader is None and topology.rank != 0:
            raise ConfigError(f"leader: rank {topology.rank} of {topology.num_ranks} must be told the address of rank 0")
        self._has_keys = keys is not None
        self._allowed = {keys.public} if keys is not None else set()
        with contextlib.ExitStack() as opened:
            memory = PoolMemory([region for component in components for region in component.regions])
            opened.callback(memory.close)
            allow, looks = self._allowed.__contains__, memory.spin_s > 0
            channel = Channel(listen, keys=keys, insecure=insecure, allow=allow, looks=looks)
            opened.callback(channel.close)
            self._channel = channel
            self.backend = backend(options) if callable(backend) else backends.load(backend, options, gpu=memory.has_gpu)
            opened.callback(self.backend.close)
            shape = memory.staging(self.backend.staging, pack_below=pack_below)
            slots, rings = (
                (SlotPool(shape, memory.beside), RingPool(shape, memory.beside)) if shape.pack_below else (None, None)
            )
            staged = [pool.region for pool in (slots, rings) if pool is not None]
            self.backend.register(merge_regions([*memory.regions, *staged]))
            table = self._local.table.encode()
            self._opened = opened.pop_all()
        self.address = advertised_address(advertise, channel.address)
        identity = Identity(
            instance=name,
            rank=topology.rank,
            num_ranks=topology.num_ranks,
            epoch=secrets.randbits(62),
            model=model.name,
            revision=model.revision,
            table=table,
            address=self.address,
            leader=leader is None,
        )
        self._limits = limits or Limits()
        packing = Packing(rings, limits=self._limits)
        self._handshake = Handshake(
            identity,
            self._local,
            self.backend,
            grant=packing.grant,
            memory=memory,
            packs=slots is not None,
            break_even=BreakEven(
                self.backend,
                shape,
                None if slots is None else slots.region,
                given=pack_below is not None,
                gather=None if slots is None else memory.gather(slots.region),
            ),
        )
        self._links = PeerTable(
            identity,
            leader=leader,
            own_key=keys.public if keys is not None else None,
            accept_hello=self._handshake.accept_hello,
            validate_welcome=self._handshake.validate_welcome,
            limits=connection_limits,
        )
        held = self._local.table.ranks[topology.group_rank].by_name
        self._sizes = {name: HeldSize(layout) for name, layout in held.items()}
        self.spin_s = memory.spin_s
        self._handles: dict[tuple[str, str, RequestKey], Receiver | Sender] = {}
        self._leases: dict[Lease, Session] = {}
        self._events: deque[Event] = deque()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._draining = self._closed = False
        self._hub = Hub(
            channel=channel,
            links=self._links,
            handshake=self._handshake,
            sessions=Sessions(group=topology.dp_rank, limits=self._limits),
            backend=self.backend,
            packing=packing,
            slots=slots,
            spin_s=self.spin_s,
            local=self._local,
            digest=memory.digest,
            on_begin=self._begin_request,
            on_events=self._end_requests,
            on_death=self._fail_everything,
        )
        self._metrics = None if metrics_port is None else Metrics(self._snapshot)
        self.metrics_url = None if metrics_port is None else self._serve_metrics(metrics_host, metrics_port)
        self._hub.start()
        self._hub.command(self._links.join)
        logger.info(
            "%s: listening at %s, backend %s over %s, components %s%s",
            self._handshake.me, self.address, self.backend.name, self.backend.transport, ", ".join(c.name for c in components),
            f", metrics at {self.metrics_url}" if self.metrics_url else "",
        )  # fmt: skip

    def __enter__(self) -> KVManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- peers -------------------------------------------------------------------------------------------------------

    def add_peer(self, name: str, *, address: str, public_key: str | None = None) -> None:
        """Know a peer instance by the control address of its leader. A new address or key replaces the old one."""
        self._check_alive()
        parse_address(address, what=f"peer {name!r}")
        if name == self.name:
            raise ConfigError(f"peer: {name!r} is this instance's own name")
        if self._has_keys and public_key is None:
            raise ConfigError(f"peer {name!r}: this instance has keys, so the peer's public key is needed")
        if public_key is not None:
            check_key(public_key, what=f"peer {name!r}, public key")
            self._allowed.add(public_key)
        self._hub.command(lambda now: self._links.add_peer(name, address, public_key, now))

    def wait_ready(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Wait until every rank of a peer has answered, plans are compared, and the engine is connected.

        Raises `PeerUnreachable` with the reason where that does not happen in time.
        """
        with self._hub.changed:
            self._hub.changed.wait_for(lambda: self._is_ready(name) or self._problem, timeout_s)
        self._check_alive()
        if not self._is_ready(name):
            raise PeerUnreachable(f"peer {name!r} is not ready after {timeout_s} s: {self._peer_problem(name)}")

    def engine(self, peer: str, rank: int) -> tuple[Backend, RemotePeer]:
        """The engine and its connection to one rank, for measuring it without the protocol.

        Raises `PeerUnreachable` where that rank is not connected.
        """
        remote = self._handshake.rank(PeerRank(peer, rank))
        if remote is None:
            raise PeerUnreachable(f"peer {peer!r}, rank {rank}: {self._peer_problem(peer)}")
        return self.backend, remote.engine

    # -- requests ----------------------------------------------------------------------------------------------------

    def receiver(
        self,
        request_id: bytes,
        *,
        peer: str,
        rows: Mapping[str, Rows],
        need: Mapping[str, TokenRange] | None = None,
        group: int = 0,
        attempt: int = 0,
        deadline_s: float = 60.0,
        ready: ReadyEvent | None = None,
        tag: Any = None,
    ) -> Receiver:
        """Reserve rows for a request that `peer`'s `group` will send. `need` says, for each component of pages, which
        tokens `[start, stop)` of the request; a slot is always needed whole.

        Nothing is reserved before `ready` has passed. Raises `PeerUnreachable` where the peer is not ready, `LayoutError`
        for rows that cannot take what is needed, `LocalProtocolError` for an attempt that was used before.
        """
        agreement = self._agreement(peer)
        group = _number(group, f"group of peer {peer!r}", agreement.num_groups)
        self.check_kinds(rows)
        needed = self._needs(agreement, rows, need or {})
        receiver = Receiver(self, _key(request_id, attempt), peer, tag, needed)
        self._add(receiver)
        expected, rows = agreement.expected(self._local, group, needed), dict(rows)

        def open_receive(now: float) -> None:
            session = receiver.session = self._hub.sessions.receives.open(
                receiver.key,
                peer=peer,
                nonce=secrets.randbits(62),
                source_group=group,
                rows=rows,
                need=needed,
                expected=expected,
                now=now,
                deadline=now + deadline_s,
                ready=ready is None,
                verify=self._verify,
                tag=tag,
            )
            self._leases[session.lease] = session
            if ready is not None:
                self._hub.when_ready(session, ready)

        self._open(receiver, open_receive)
        return receiver

    def sender(self, request_id: bytes, *, peer: str, attempt: int = 0, deadline_s: float = 60.0, tag: Any = None) -> Sender:
        """Serve a request to `peer`, whichever of its groups reserves it. Order is free: rows sent before are held.

        Raises `PeerUnreachable` where the peer is not ready, `LocalProtocolError` for an attempt that was used before.
        """
        agreement = self._agreement(peer)
        sender = Sender(self, _key(request_id, attempt), peer, tag)
        self._add(sender)

        def open_send(now: float) -> None:
            session = sender.session = self._hub.sessions.sends.open(
                sender.key,
                peer=peer,
                expected=agreement.readers(self._local),
                peer_group_size=agreement.group_size,
                now=now,
                deadline=now + deadline_s,
                tag=tag,
            )
            self._leases[session.lease] = session

        self._open(sender, open_send)
        return sender

    def events(self) -> list[Event]:
        """Every request that has ended since the last call; where there is none, the manager's threads have had the interpreter
        while they had work, for 100 us at most.
        """
        if not self._events:
            _native.yield_gil()
        with contextlib.suppress(OSError):  # nothing to read, or closed
            os.eventfd_read(self._event_fd)
        return [self._events.popleft() for _ in range(len(self._events))]

    def fileno(self) -> int:
        """A descriptor that is readable while `events` has something to give."""
        return self._event_fd

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Work over the transfers that this rank has started."""
        return self._hub.stats

    def health(self) -> Health:
        """The state now; never blocks."""
        names = list(self._links.instances)
        quarantined: dict[str, int] = {}
        for lease in list(self._leases):
            if lease.state is LeaseState.QUARANTINED:
                quarantined[lease.reason] = quarantined.get(lease.reason, 0) + 1
        sessions = self._hub.sessions
        return Health(
            not self._problem,
            self._problem,
            {
                name: PeerHealth(self._is_ready(name), self._peer_problem(name), self._handshake.thresholds(name))
                for name in names
            },
            len(sessions.receives.sessions),
            len(sessions.sends.sessions),
            quarantined,
            self._renewal_due(sum(quarantined.values())),
        )

    def _renewal_due(self, num_quarantined: int) -> str:
        bound = self._limits.max_quarantined
        return f"requests with quarantined rows: {num_quarantined}, of {bound} at most" if num_quarantined > bound else ""

    def drain(self, *, timeout_s: float) -> bool:
        """Take no new requests, and wait for those under way; whether all have ended in time."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        for handle in list(self._handles.values()):
            with contextlib.suppress(TimeoutError):
                handle.wait(timeout_s=max(0.0, deadline - time.monotonic()))
        return not self._handles

    def close(self) -> None:
        """SendTo goodbye, end what is under way, stop the threads and the engine. A second call does nothing.

        Where the engine's end proves all rows quiet, those that were quarantined are released as well.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._hub.stop("the manager was closed")
        self._fail_everything("the manager was closed")
        self._hub.notify()
        self._opened.close()
        os.close(self._event_fd)
        if isinstance(self.backend, QuietWhenClosed) and self.backend.is_quiet_when_closed():
            for lease in list(self._leases):
                lease.release()

    def interpose(self, wrap: Callable[[Channel], Wire]) -> None:
        """Put something between this manager and its control channel, as `disagg.testing.faults.mistreat` does; once."""
        self._hub.interpose(wrap)

    # -- for handles, in the server's threads ------------------------------------------------------------------------

    def send(self, sender: Sender, chunk: Chunk) -> None:
        """See `Sender.send`."""

        def send(now: float) -> None:
            if sender.session is not None:
                self._hub.sessions.sends.send(sender.session, chunk, now)

        self._check_alive()
        self._hub.command(send)

    def finish(self, sender: Sender, payload: bytes, chunk: Chunk | None) -> None:
        """See `Sender.finish`."""

        def finish(now: float) -> None:
            if sender.session is not None:
                if chunk is not None:
                    self._hub.sessions.sends.send(sender.session, chunk, now)
                self._hub.sessions.sends.finish(sender.session, payload, now)

        self._check_alive()
        self._hub.command(finish)

    def abort(self, handle: Receiver | Sender, error: RequestAborted) -> None:
        """See `Receiver.abort` and `Sender.abort`."""

        def abort(now: float) -> None:
            if isinstance(handle, Receiver) and handle.session is not None:
                self._hub.sessions.receives.abort(handle.session, error, now)
            elif isinstance(handle, Sender) and handle.session is not None:
                self._hub.sessions.sends.abort(handle.session, error, now)

        if not self._problem:
            self._hub.command(abort)

    def check_kinds(self, rows: Mapping[str, Rows]) -> None:
        """That rows are of declared components and of their kind; raises `LocalProtocolError`."""
        for name, given in rows.items():
            layouts = self._local.table.components.get(name)
            if layouts is None:
                known = ", ".join(sorted(self._local.table.components))
                raise LocalProtocolError(f"rows: no component {name!r} was declared; there are {known}")
            kind = next(layout.rows for layout in layouts if layout is not None)
            expected = Pages if kind == "pages" else Slot
            if not isinstance(given, expected):
                raise LocalProtocolError(f"rows of {name!r}: expected {expected.__name__}, found {type(given).__name__}")
            if isinstance(given, Pages) and given.first_token > MAX_TOKEN:
                raise LocalProtocolError(f"rows of {name!r}: expected a first token of 0 to 2**40, found {given.first_token}")

    def _needs(self, agreement: Agreement, rows: Mapping[str, Rows], need: Mapping[str, TokenRange]) -> dict[str, TokenRange]:
        """What this rank needs of every agreed component that it holds; checks the rows against it."""
        unknown = sorted(need.keys() - self._local.table.components.keys())
        if unknown:
            raise LocalProtocolError(f"need: no component {unknown[0]!r} was declared")
        held = self._local.table.ranks[self.topology.group_rank].by_name
        needed: dict[str, TokenRange] = {}
        for name in agreement.incoming.components:
            layout, placement = held.get(name), self._local.placements.get(name)
            if layout is None or placement is None:
                continue
            asked = (0, 1) if layout.rows == "slot" else token_range(need.get(name))
            if asked is None:
                found = need.get(name)
                raise LocalProtocolError(f"need of {name!r}: expected integers 0 <= start <= stop <= 2**40, found {found}")
            needed[name] = asked
            if asked[0] == asked[1]:
                continue
            if name not in rows:
                raise LocalProtocolError(f"rows: component {name!r} is needed, but no rows are given for it")
            check_rows(layout, placement, rows[name], needed[name])
        return needed

    def _agreement(self, peer: str) -> Agreement:
        self._check_alive()
        if self._draining:
            raise LocalProtocolError("the manager is draining: it takes no new requests")
        agreement = self._handshake.agreement(peer)
        if agreement is None or not self._is_ready(peer):
            raise PeerUnreachable(f"peer {peer!r} is not ready: {self._peer_problem(peer)}")
        return agreement

    def _add(self, handle: Receiver | Sender) -> None:
        if self._handles.setdefault(_place(handle), handle) is not handle:
            raise LocalProtocolError(f"request {handle.key}: this attempt is under way; use a new attempt number")

    def _open(self, handle: Receiver | Sender, run: Callable[[float], None]) -> None:
        """Have a session opened; its failure ends the handle, and so does a control thread that died just now."""
        self._hub.command(run, on_error=lambda error: self._end_unopened(handle, error))
        if self._hub.over:
            self._fail_everything(self._problem)

    @property
    def _problem(self) -> str:
        return self._hub.problem or ("the manager was closed" if self._closed else "")

    def _check_alive(self) -> None:
        if self._problem:
            raise LocalProtocolError(f"the manager has ended: {self._problem}")

    def _is_ready(self, name: str) -> bool:
        instance = self._links.instances.get(name)
        return instance is not None and instance.ready and self._handshake.num_connected(name) == instance.num_ranks

    def _peer_problem(self, name: str) -> str:
        instance = self._links.instances.get(name)
        if instance is None:
            return "it is not configured; add_peer() it"
        return "" if self._is_ready(name) else instance.problem

    # -- ends, in the hub's threads ----------------------------------------------------------------------------------

    def _begin_request(self, peer: str, key: RequestKey) -> None:
        """Have a receiver's waiting threads ready."""
        handle = self._handles.get((Receiver.direction, peer, key))
        if handle is not None:
            handle.begin()

    def _end_requests(self, ended: Sequence[tuple[Event, Work]]) -> None:
        """Tell the server, the log and the metrics; then whoever waits goes on, and may keep the interpreter."""
        told: list[Receiver | Sender] = []
        try:
            for event, work in ended:
                handle = self._handles.pop((event.direction, event.peer, event.key), None)
                event.lease.on_release(functools.partial(self._forget, event.lease))
                if handle is None:
                    continue
                try:
                    self._account(event, handle, work)
                finally:
                    handle.end(event)
                    told.append(handle)
                    self._events.append(event)
        finally:
            if told:
                os.eventfd_write(self._event_fd, 1)
                for handle in told:
                    handle.wake()
                told[-1].let_go_first()

    def _forget(self, lease: Lease) -> None:
        self._leases.pop(lease, None)

    def _end_unopened(self, handle: Receiver | Sender, error: DisaggError) -> None:
        """A request that could not be opened: nothing ever touched its rows."""
        lease = Lease()
        lease.release()
        self._end_requests([(_failed(handle, error, lease), Work())])

    def _fail_everything(self, reason: str) -> None:
        """Nothing can be promised any more: every request ends, and rows that are not released are quarantined."""
        for lease in list(self._leases):
            lease.quarantine(reason)
        for handle in list(self._handles.values()):
            error = RequestAborted(reason, cause=Cause.ENDED)
            if handle.session is None:
                self._end_unopened(handle, error)
            else:
                self._end_requests([(_failed(handle, error, handle.session.lease), Work())])

    # -- what is counted ---------------------------------------------------------------------------------------------

    def _serve_metrics(self, host: str, port: int) -> str:
        assert self._metrics is not None
        try:
            server = MetricsServer(self._metrics, host=host, port=port)
        except ConfigError:
            self._opened.close()
            os.close(self._event_fd)
            raise
        self._opened.callback(server.close)
        return server.url

    def _account(self, event: Event, handle: Receiver | Sender, work: Work) -> None:
        cause = None if event.error is None else event.error.cause
        if wanted(self._metrics, cause):
            account(self._record(event, handle, work, cause), self._metrics)

    def _record(self, event: Event, handle: Receiver | Sender, work: Work, cause: Cause | None) -> RequestRecord:
        nbytes = work.nbytes
        if isinstance(handle, Receiver):
            nbytes = sum(self._sizes[name].nbytes(need) for name, need in handle.need.items()) if event.ok else 0
        return RequestRecord(
            rank=str(self._handshake.me),
            request_id=event.key.request_id.hex(),
            attempt=event.key.attempt,
            direction=event.direction,
            peer=event.peer,
            outcome="ok" if cause is None else "failed",
            cause="" if cause is None else cause.value,
            nbytes=nbytes,
            pieces=work.pieces,
            total_s=time.monotonic() - handle.opened_at,
            bind_s=work.bind_s,
            pack_s=work.pack_s,
            post_s=work.post_s,
            wire_s=work.wire_s,
            unpack_s=work.unpack_s,
            lease=event.lease.state.value,
            error="" if event.error is None else str(event.error),
        )

    def _snapshot(self) -> Snapshot:
        """In a scraper's thread; never blocks."""
        hub, sessions, stats = self._hub, self._hub.sessions, self._hub.stats
        names = list(self._links.instances)
        rows, requests = quarantined(self._leases, ended=self._problem != "")
        return Snapshot(
            healthy=not self._problem,
            peers_ready={name: self._is_ready(name) for name in names},
            peer_ranks={name: self._handshake.num_connected(name) for name in names},
            pack_below={name: _largest(self._handshake.thresholds(name)) for name in names},
            peer_losses={name: hub.peer_losses[name] for name in names},
            requests=states(list(sessions.receives.sessions.values()), list(sessions.sends.sessions.values())),
            quarantined_rows=rows,
            quarantined_requests=requests,
            queue_depths={**hub.queue_depths(), "events": len(self._events)},
            refusals={
                "connection": self._channel.refused,
                "hello": hub.rejected_hellos,
                "message": hub.refused_messages,
            },
            transfer_nbytes=stats.nbytes_by_way,
            phase_seconds={phase: getattr(stats, f"{phase}_s") for phase in ("bind", "pack", "post", "wire", "unpack")},
            transfers=stats.transfers,
            transfer_failures=stats.failures,
            pieces=stats.pieces,
        )


def _largest(thresholds: Mapping[int, Threshold]) -> int:
    return max((threshold.nbytes for threshold in thresholds.values()), default=0)


def _place(handle: Receiver | Sender) -> tuple[str, str, RequestKey]:
    return handle.direction, handle.peer, handle.key


def _failed(handle: Receiver | Sender, error: DisaggError, lease: Lease) -> Event:
    return Event(handle.key, handle.peer, handle.direction, False, b"", error, lease, handle.tag)


def _key(request_id: bytes, attempt: int) -> RequestKey:
    if len(request_id) != 16:
        raise LocalProtocolError(f"request id: expected 16 bytes (new_request_id()), found {request_id!r}")
    return RequestKey(request_id, _number(attempt, "attempt", 2**31))


def _number(given: int, what: str, bound: int) -> int:
    """An integer of any kind as Python's own; raises `LocalProtocolError` unless it is from 0 to below `bound`."""
    try:
        number = operator.index(given)
    except TypeError:
        number = -1
    if not 0 <= number < bound:
        raise LocalProtocolError(f"{what}: expected 0 to {bound - 1}, found {given!r}")
    return number


def _options(
    listen: str, advertise: str | None, transport: str, devices: Sequence[str], require: str | None, trusted_network: bool
) -> BackendOptions:
    """What the engine is told."""
    host, _ = parse_address(advertise or listen, what="advertise" if advertise else "listen")
    if is_wildcard(host):
        raise ConfigError(f"listen: {listen!r} is every interface, so advertise=tcp://host:port must say where peers reach it")
    return BackendOptions(
        host=host,
        transport=_transport(transport, "transport"),
        devices=tuple(devices),
        require=None if require is None else _transport(require, "require"),
        trusted_network=trusted_network or is_loopback(host),
    )


def _check_verify(value: Verify) -> Verify:
    if value not in get_args(Verify):
        raise ConfigError(f"verify: expected one of {', '.join(get_args(Verify))}, found {value!r}")
    return value


def _transport(value: str, what: str) -> Transport:
    try:
        return Transport(value)
    except ValueError:
        raise ConfigError(f"{what}: expected one of {', '.join(t.value for t in Transport)}, found {value!r}") from None
