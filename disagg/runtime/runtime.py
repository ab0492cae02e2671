"""Everything that runs in one manager, built from its settings and joined."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from disagg.backends import registry
from disagg.backends.abilities import QuietWhenClosed, renewal_due
from disagg.backends.base import Backend, BackendOptions
from disagg.core.address import advertised_address
from disagg.core.errors import LocalProtocolError
from disagg.core.leases import LeaseState
from disagg.core.memory import merge_regions
from disagg.core.topology import Topology
from disagg.ending import Ending
from disagg.layout.agreement import LocalRank, ModelId
from disagg.layout.placement import Component
from disagg.protocol.peer_effects import ConnectionLimits, Identity
from disagg.protocol.peers import Admit, PeerTable
from disagg.protocol.send_table import Readers
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import NEVER, Limits, PeerRank
from disagg.requests import Receiver, Sender
from disagg.runtime.accounting import Stats
from disagg.runtime.channel import Channel
from disagg.runtime.connections import Connections
from disagg.runtime.directory import Directory
from disagg.runtime.dispatch import Dispatch
from disagg.runtime.handshake import Handshake
from disagg.runtime.keys import KeyPair
from disagg.runtime.lifetime import Lifetime
from disagg.runtime.loop import JOIN_TIMEOUT_S, CommandQueue, Loop
from disagg.runtime.metrics import Metrics
from disagg.runtime.openings import Openings, OpenSession
from disagg.runtime.peer_processes import PeerProcesses
from disagg.runtime.request_table import RequestTable
from disagg.runtime.tracing import Tracing
from disagg.runtime.transfers import Transfers
from disagg.runtime.verification import Verification
from disagg.runtime.wire import Wire
from disagg.transfer.pool_memory import PoolMemory
from disagg.transfer.staging import LentSlots, SlotPool
from disagg.transfer.worker import TransferWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Checked settings; `KVManager` has the meaning of each."""

    name: str
    topology: Topology
    model: ModelId
    backend: str | Callable[[BackendOptions], Backend]
    options: BackendOptions
    listen: str
    advertise: str | None
    leader: str | None
    peers: Mapping[str, tuple[str, str | None]]
    admit: Admit | None
    any_key: bool
    keys: KeyPair | None
    peer_keys: frozenset[str]
    insecure: bool
    pack_below: int | None
    staging_nbytes: int | None
    direct_between_hosts: bool
    limits: Limits
    connection_limits: ConnectionLimits | None
    metrics: Metrics | None
    tracing: Tracing | None


class Runtime:
    def __init__(self, settings: RuntimeSettings, components: Sequence[Component]) -> None:
        self.local = LocalRank.of(settings.topology, components)
        self.limits = settings.limits
        self.stats = Stats()
        self._configured = settings.peers
        self.allowed_keys = set(settings.peer_keys)
        if settings.keys is not None:
            self.allowed_keys.add(settings.keys.public)
        self._interposed = False
        with contextlib.ExitStack() as opened:
            self.lifetime = Lifetime(self._close, threads=self.threads)
            opened.callback(self.lifetime.forget)
            name = f"{settings.name}/{settings.topology.rank}"
            self.requests = RequestTable(
                name=name,
                local=self.local,
                group_rank=settings.topology.group_rank,
                metrics=settings.metrics,
                tracing=settings.tracing,
            )
            opened.callback(self.requests.close)
            self._open(settings, components, opened)
            self.commands = CommandQueue(self.channel)
            self.command = self.commands.put
            self._build(settings)
            self.opened = opened.pop_all()

    def _open(self, settings: RuntimeSettings, components: Sequence[Component], opened: contextlib.ExitStack) -> None:
        self.memory = PoolMemory([region for component in components for region in component.regions])
        opened.callback(self.memory.close)
        self.spin_s = self.memory.spin_s
        """How long a thread polls after the last activity, in seconds."""
        heartbeat = settings.connection_limits or ConnectionLimits()
        self.channel = Channel(
            settings.listen,
            keys=settings.keys,
            insecure=settings.insecure,
            allow=(lambda _: True) if settings.any_key else self.allowed_keys.__contains__,
            heartbeat_s=heartbeat.heartbeat_s,
            heartbeat_timeout_s=heartbeat.heartbeat_timeout_s,
        )
        opened.callback(self.channel.close)
        backend, options = settings.backend, settings.options
        self.backend = backend(options) if callable(backend) else registry.load(backend, options, gpu=self.memory.has_gpu)
        opened.callback(self.backend.close)
        shape = self.memory.staging(self.backend.staging, pack_below=settings.pack_below, nbytes=settings.staging_nbytes)
        self._slots = SlotPool(shape, self.memory.allocate_on_device) if shape.pack_below else None
        lent = LentSlots(shape, self.memory.allocate_on_device) if shape.pack_below else None
        self._staging = [pool.memory for pool in (self._slots, lent) if pool is not None]
        self.backend.register(merge_regions([*self.memory.regions, *(each.region for each in self._staging)]))
        self.pack_below = shape.pack_below
        self.staging_nbytes = shape.nbytes if shape.pack_below else 0
        self.address = advertised_address(settings.advertise, self.channel.address)
        identity = Identity(
            instance=settings.name,
            rank=settings.topology.rank,
            num_ranks=settings.topology.num_ranks,
            epoch=secrets.randbits(62),
            model=settings.model.name,
            revision=settings.model.revision,
            table=self.local.table.encode(),
            address=self.address,
            leader=settings.topology.rank == 0,
        )
        self.processes = PeerProcesses(identity.instance, identity.rank, identity.epoch)
        opened.callback(self.processes.close)
        self.sessions = Sessions(
            group=settings.topology.dp_rank,
            epoch=identity.epoch,
            limits=settings.limits,
            slots=lent,
            readers_of=self._readers_of,
        )
        self.handshake = Handshake(
            identity,
            self.local,
            self.backend,
            lend=self.sessions.lender.open,
            memory=self.memory,
            pack_below=shape.pack_below,
            direct_between_hosts=settings.direct_between_hosts,
            attest=self.processes.attest,
        )
        self.peers = PeerTable(
            identity,
            leader=settings.leader,
            own_key=settings.keys.public if settings.keys is not None else None,
            accept_hello=self.handshake.accept_hello,
            validate_welcome=self.handshake.validate_welcome,
            admit=settings.admit,
            limits=settings.connection_limits,
        )

    def _build(self, settings: RuntimeSettings) -> None:
        name = str(self.handshake.me)
        self.worker = TransferWorker(
            self.backend,
            name=name,
            slots=self._slots,
            caller_steps=self.spin_s > 0,
            on_reports=self.channel.wake,
            on_death=lambda error: self.loop.fail("transfer", error),
        )
        self.verification = Verification(
            name=name,
            sessions=self.sessions,
            local=self.local,
            digest=self.memory.digest,
            stats=self.stats,
            command=self.commands.put,
            on_death=lambda error: self.loop.fail("checksum", error),
        )
        self.transfers = Transfers(
            sessions=self.sessions,
            handshake=self.handshake,
            worker=self.worker,
            verification=self.verification,
            requests=self.requests,
            stats=self.stats,
            pack_below=self.pack_below,
            on_unreachable=self.peers.on_unreachable,
        )
        self.connections = Connections(
            backend=self.backend,
            handshake=self.handshake,
            peers=self.peers,
            sessions=self.sessions,
            processes=self.processes,
            command=self.commands.put,
            on_connected=self._on_connected,
            renewal_due=self.renewal_due,
        )
        self.dispatch = Dispatch(
            channel=self.channel,
            peers=self.peers,
            handshake=self.handshake,
            connections=self.connections,
            transfers=self.transfers,
            command=self.commands.put,
            on_peer_changed=self._on_peer_changed,
            on_forgotten=self._on_forgotten,
        )
        self.directory = Directory(
            peers=self.peers,
            handshake=self.handshake,
            local=self.local,
            command=self.commands.put,
            carry_out=self.dispatch.carry_out_peers,
            on_changed=self._on_peer_changed,
            allowed_keys=self.allowed_keys,
            admits_unknown=settings.admit is not None,
        )
        self.openings = Openings(self.directory, self.requests, self.commands)
        self.end_unopened = self.openings.end
        self.loop = Loop(
            name=name,
            channel=self.channel,
            commands=self.commands,
            dispatch=self.dispatch,
            timed=(self.dispatch.probes, self.peers, self.sessions, self.connections, self.openings),
            worker=self.worker,
            spin_s=self.spin_s,
            on_death=self._on_death,
        )

    def start(self) -> None:
        for name, (address, key) in self._configured.items():  # before the first message is answered
            self.peers.add_peer(name, address, key, time.monotonic())
        self.worker.start()
        self.loop.start()
        self.commands.put(self.peers.join)

    def open(self, handle: Receiver | Sender, ending: Ending, open_session: OpenSession, *, wait_until: float = NEVER) -> None:
        """A receive waits for its peer until `wait_until`. A failure ends the request, also if the control thread dies just
        now.
        """
        self.requests.add(handle, ending)
        self.openings.put(handle, open_session, wait_until)
        if self.loop.over:
            self.requests.fail_all(self.problem)

    def threads(self) -> tuple[threading.Thread, ...]:
        """Those that call the server."""
        closing = () if self.lifetime.thread is None else (self.lifetime.thread,)
        return self.loop.thread, self.worker.thread, self.verification.worker.thread, *closing

    def _close(self) -> None:
        self.commands.put(lambda _: self.peers.close("the manager was closed"))
        self.loop.stop()
        self.dispatch.close()
        self.connections.join(JOIN_TIMEOUT_S)
        self.worker.stop(JOIN_TIMEOUT_S)
        self.verification.worker.stop(JOIN_TIMEOUT_S)
        self.requests.fail_all("the manager was closed")
        self.directory.notify()
        try:
            self.opened.close()
        finally:
            if self._is_quiet():
                self.requests.release_all()
            else:
                for memory in self._staging:
                    memory.keep_mapped()

    def _is_quiet(self) -> bool:
        """Whether the closed engine proves it. What an engine raises proves nothing."""
        try:
            return isinstance(self.backend, QuietWhenClosed) and self.backend.is_quiet_when_closed()
        except Exception:
            logger.exception("%s: whether the closed engine is quiet", self.handshake.me)
            return False

    def interpose(self, wrap: Callable[[Channel], Wire]) -> None:
        if self._interposed:
            raise LocalProtocolError("interpose: something was already put between this manager and its channel")
        self._interposed, wire = True, wrap(self.channel)
        self.loop.channel = self.dispatch.channel = wire

    # -- state, for any thread ---------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why the manager has ended; empty while it works."""
        return self.lifetime.inherited or self.loop.problem or self.lifetime.problem

    @property
    def inherited(self) -> str:
        return self.lifetime.inherited

    def renewal_due(self) -> str:
        """Why the engine must be closed and started again; empty while it works."""
        found = sum(each.lease.state is LeaseState.QUARANTINED for each in tuple(self.sessions.receives.sessions.values()))
        limit = self.limits.max_quarantined
        too_many = f"receives with quarantined rows: {found}, of {limit} at most" if found > limit else ""
        return "; ".join(filter(None, (too_many, self.sessions.lender.problem, renewal_due(self.backend))))

    def queue_depths(self) -> dict[str, int]:
        return {
            "commands": len(self.commands.pending),
            "transfers": self.worker.depth,
            "rows_not_ready": len(self.transfers.not_ready),
            "parked_reserves": len(self.sessions.sends.parked),
            "waiting_for_peers": len(self.openings),
            "early_transfers": self.transfers.num_unconnected,
            "sums": self.verification.worker.depth,
            "fences": self.connections.num_fencing,
            "events": self.requests.num_events,
        }

    # -- the runtime's own threads -----------------------------------------------------------------------------------

    def _readers_of(self, name: str) -> Readers:
        return self.directory.readers(name)

    def _on_connected(self, peer: PeerRank) -> None:
        self.dispatch.announce(peer)
        self.transfers.connected(peer, time.monotonic())
        self._on_peer_changed(peer.instance)

    def _on_peer_changed(self, name: str) -> None:
        self.openings.advance(name)
        self.directory.notify()

    def _on_forgotten(self, name: str, cause: str) -> None:
        self.openings.fail_all(name, f"peer {name!r} was removed: {cause}")
        self.transfers.forget(name, now := time.monotonic())
        self.handshake.forget(name)
        self.sessions.forget(name, now)
        self.connections.forget(name)
        self.directory.forgotten(name)

    def _on_death(self, problem: str) -> None:
        """The control thread has ended: no session changes any more."""
        try:
            self.requests.fail_all(problem)
        finally:
            self.directory.notify()
