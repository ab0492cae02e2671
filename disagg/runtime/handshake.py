"""The handshake of two ranks: introduction, validation of the peer's layout, and the connection of the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from disagg.backends.abilities import Gathering, SeveralEngines
from disagg.backends.base import Backend, RemotePeer
from disagg.backends.endpoint import decode_endpoint
from disagg.core.errors import LayoutError, PeerIncompatible, PeerUnreachable, RemoteProtocolError
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.thread_log import ThreadLog
from disagg.layout.agreement import Agreement, LocalRank, decode_placements, differing_words, encode_placements
from disagg.layout.checksums import ChecksumPlan
from disagg.layout.plan import TransferPlan
from disagg.machine.descriptors import shortage
from disagg.machine.processes import ProcessWatch
from disagg.protocol.connection import PeerConnection
from disagg.protocol.messages import PROTOCOL_VERSION, Hello, Lending, Member, Welcome, Writing
from disagg.protocol.peer_effects import Identity, Ready, SendHello, Undecided
from disagg.protocol.types import PeerRank, RequestKey, StartTransfer
from disagg.runtime.agreements import Agreements
from disagg.runtime.streams import MakeStream, PreparedPlan, has_small, prepare, stream_maker
from disagg.transfer.pool_memory import PoolMemory
from disagg.transfer.staging import Loans

logger = ThreadLog(__name__)

MAX_TOLD = 2
"""Processes of a rank whose terms are remembered."""


@dataclass(frozen=True)
class RemoteRank:
    """A rank of a peer with a connected engine. `process` is there if the kernel attests it. `direct`: this rank may write
    its rows, and not only slots. `has_small`: it may pack some of what it writes here. `prepared` is `plan` as the engine
    has it, if the engine computes addresses. `pack` and `unpack` make the streams of `plan` and `incoming`.
    """

    epoch: int
    generation: int
    engine: RemotePeer
    process: ProcessWatch | None
    plan: TransferPlan
    incoming: TransferPlan
    loans: Loans | None
    direct: bool
    has_small: bool
    checksum_plans: Callable[[], dict[str, ChecksumPlan]]
    prepared: PreparedPlan | None
    pack: MakeStream
    unpack: MakeStream
    gathers_from: int | None


Lend = Callable[[PeerRank, int, int], Lending | None]
"""Opens an account for a peer rank, at an epoch and a generation of its connection."""

Attest = Callable[[str, int, int], ProcessWatch | None]
"""The process of a rank at an epoch, if the kernel attests it."""


@dataclass
class Peer:
    """A rank of a known instance. Only the control thread changes it.

    `told`: whether its last processes were told that they may write rows, by epoch, and `watches` these processes. `tried`
    is the last attempt to connect that was begun, `num_attempts` are under way, and `failed`: the engine could not connect
    last. `writing`: the engine by which it writes here. `waiting`: transfers that wait for the engine.
    """

    told: dict[int, bool] = field(default_factory=dict)
    watches: dict[int, ProcessWatch | None] = field(default_factory=dict)
    connecting: Ready | None = None
    tried: Ready | None = None
    num_attempts: int = 0
    failed: bool = False
    remote: RemoteRank | None = None
    writing: Writing | None = None
    waiting: dict[RequestKey, list[StartTransfer]] = field(default_factory=dict)


@dataclass
class _Instance:
    agreement: Agreement
    ranks: dict[int, Peer] = field(default_factory=dict)

    def connected(self) -> list[int]:
        return [number for number, peer in tuple(self.ranks.items()) if peer.remote is not None]


class Handshake:
    """Any thread may read it, one changes it. Pieces below `pack_below` bytes are packed (0: none, and there are no staging
    buffers).
    """

    def __init__(
        self,
        identity: Identity,
        local: LocalRank,
        backend: Backend,
        *,
        lend: Lend,
        memory: PoolMemory,
        pack_below: int,
        direct_between_hosts: bool,
        attest: Attest,
    ) -> None:
        self._identity = identity
        self._local = local
        self._backend = backend
        self._lend = lend
        self._memory = memory
        self._pack_below = pack_below
        self._direct_between_hosts = direct_between_hosts
        self._attest = attest
        self._agreements = Agreements(local)
        self._warnings = RateLimitedLog(logger, repeat_s=60.0)
        self._endpoint = b""
        self._placements = encode_placements(local.components)
        self._instances: dict[str, _Instance] = {}
        self._writing: dict[PeerRank, set[int]] = {}  # loans, over all connections

    @property
    def me(self) -> PeerRank:
        return PeerRank(self._identity.instance, self._identity.rank)

    def agreement(self, instance: str) -> Agreement | None:
        found = self._instances.get(instance)
        return found.agreement if found is not None else None

    def peer(self, peer: PeerRank) -> Peer:
        """An empty `Peer` for an unknown rank."""
        found = self._instances.get(peer.instance)
        return Peer() if found is None else found.ranks.get(peer.rank, Peer())

    def peers(self) -> list[tuple[PeerRank, Peer]]:
        instances = tuple(self._instances.items())
        return [(PeerRank(name, number), peer) for name, found in instances for number, peer in tuple(found.ranks.items())]

    def rank(self, peer: PeerRank) -> RemoteRank | None:
        return self.peer(peer).remote

    def is_connected(self, link: PeerConnection) -> bool:
        """False after a restart of the peer, until the loss of the earlier process is carried out: rows reserved until then
        would count as that process's.
        """
        rank = self.rank(link.peer)
        return rank is not None and (rank.epoch, rank.generation) == (link.epoch, link.generation)

    def num_connected(self, instance: str) -> int:
        found = self._instances.get(instance)
        return len(found.connected()) if found is not None else 0

    def hello(self, sent: SendHello, *, leader: str | None, to: PeerRank | None = None) -> Hello:
        """Introduces this rank. The rank `to` is expected at the other end."""
        return Hello(
            **self._header(),
            address=self._identity.address,
            generation=sent.generation,
            peer_epoch=sent.peer_epoch,
            dial=sent.dial,
            leader=leader,
            again=sent.again,
            to=to,
            packs=self._pack_below > 0,
        )

    def _header(self) -> dict[str, Any]:
        me = self._identity
        return {
            "version": PROTOCOL_VERSION,
            "instance": me.instance,
            "rank": me.rank,
            "epoch": me.epoch,
            "model": me.model,
            "revision": me.revision,
            "table": me.table,
        }

    def accept_hello(self, hello: Hello, members: Callable[[], tuple[Member, ...]]) -> Welcome:
        """Raises `DisaggError` with both values if a field does not match."""
        me = self._identity
        self._check_model(hello)
        known = self.rank(PeerRank(hello.instance, hello.rank))
        if hello.again or known is None or known.epoch != hello.epoch:
            self._check_descriptors(hello)
        siblings = hello.instance == me.instance
        plans = b"" if siblings else self._agree(hello).digests  # a hello that is rejected opens no account
        lending, direct = (None, True) if siblings else self._terms(hello)
        return Welcome(
            **self._header(),
            plans=plans,
            members=members() if me.leader else (),
            placements=b"" if siblings else self._placements,
            backend=self._backend.name,
            endpoint=b"" if siblings else self._own_endpoint(),
            generation=hello.generation,
            lending=lending,
            direct=direct,
        )

    def renewed(self) -> None:
        """The engine has another endpoint."""
        self._endpoint = b""

    def _own_endpoint(self) -> bytes:
        self._endpoint = self._endpoint or self._backend.endpoint()
        return self._endpoint

    def _terms(self, hello: Hello) -> tuple[Lending | None, bool]:
        """What this rank lends to a peer, and whether the peer may write rows. A process that the kernel attests may: its
        end is proved at once. Others write slots if they can, so that no row waits for a proof that cannot come.
        """
        peer = PeerRank(hello.instance, hello.rank)
        found = self.peer(peer)
        told = found.told
        if hello.epoch not in told:  # the first answer to a process stands
            process = self._attest(hello.instance, hello.rank, hello.epoch)
            must_pack = hello.packs and self._pack_below > 0 and not self._direct_between_hosts
            told[hello.epoch], found.watches[hello.epoch] = process is not None or not must_pack, process
            if len(told) > MAX_TOLD:
                del found.watches[next(iter(told))], told[next(iter(told))]
        return self._lend(peer, hello.epoch, hello.generation), told[hello.epoch]

    def is_direct(self, peer: PeerRank, epoch: int) -> bool:
        """Whether a rank at an epoch may have written rows."""
        told = self.peer(peer).told
        return told.get(epoch, len(told) == MAX_TOLD)  # it may be among the forgotten ones

    def validate_welcome(self, welcome: Welcome) -> tuple[int, frozenset[int]]:
        """The peer's number of ranks, and those that this rank connects to."""
        who = PeerRank(welcome.instance, welcome.rank)
        self._check_model(welcome)
        if welcome.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(f"protocol version: {welcome.version} at {who}, {PROTOCOL_VERSION} at {self.me}")
        if welcome.backend != self._backend.name:
            names = welcome.backend, self._backend.name
            several = (
                "; 'auto' is several engines, so both sides must use it, or name the same engine" if "auto" in names else ""
            )
            raise RemoteProtocolError(f"backend: {welcome.backend!r} at {who}, {self._backend.name!r} at {self.me}{several}")
        agreement = self._agree(welcome)
        agreement.check_digests(welcome.plans)
        return agreement.num_ranks, agreement.partners(self._local)

    def _check_descriptors(self, hello: Hello) -> None:
        """Some engines do not recover if no descriptor is left to accept the peer."""
        if short := shortage():
            problem = f"{hello.instance}/{hello.rank} must wait: {short}"
            self._warnings.warning("%s: %s", self.me, problem)
            raise Undecided(problem, retry_s=0.5)

    def _check_model(self, theirs: Hello | Welcome) -> None:
        who = PeerRank(theirs.instance, theirs.rank)
        me = self._identity
        if theirs.model != me.model:
            raise RemoteProtocolError(f"model: {theirs.model!r} at {who}, {me.model!r} at {self.me}")
        if theirs.revision != me.revision:
            found, expected = differing_words(theirs.revision, me.revision)
            raise RemoteProtocolError(f"model revision: {found!r} at {who}, {expected!r} at {self.me}")

    def _agree(self, theirs: Hello | Welcome) -> Agreement:
        """Raises `Undecided` while the agreement is being computed."""
        known = self._instances.get(theirs.instance)
        if known is None or known.agreement.table_bytes != theirs.table:
            if known is not None and (connected := known.connected()):
                others = ", ".join(map(str, sorted(connected)))
                raise Undecided(f"ranks {others} of {theirs.instance!r} are connected with another layout table", retry_s=0.5)
            try:
                agreement = self._agreements.get(theirs.table, theirs.instance)
            except LayoutError as error:
                raise LayoutError(f"{theirs.instance}/{theirs.rank} and {self.me}: {error}") from error
            known = self._instances.setdefault(theirs.instance, _Instance(agreement))
            known.agreement = agreement
            if self._identity.leader and (left_out := known.agreement.left_out(self._local)):
                ours, what = self._identity.instance, ", ".join(left_out)
                logger.info("%s and %s do not share these optional components, and move none: %s", ours, theirs.instance, what)
            if self._identity.leader and (converted := known.agreement.outgoing.converted):
                what = ", ".join(f"{name} ({', '.join(roles)})" for name, roles in converted)
                logger.info("%s and %s convert these components to each other's format: %s", self.me, theirs.instance, what)
        if theirs.rank >= known.agreement.num_ranks:
            raise RemoteProtocolError(f"rank {theirs.rank} of {theirs.instance!r}, whose table has {known.agreement.num_ranks}")
        known.ranks.setdefault(theirs.rank, Peer())
        return known.agreement

    def connecting(self, peer: PeerRank, welcome: Welcome) -> Callable[[], RemoteRank]:
        """A function that connects the engine and plans. It may block for as long as the engine waits for the peer, so
        another thread calls it.
        """
        writing, process = self._writing.setdefault(peer, set()), self.peer(peer).watches.get(welcome.epoch)
        return functools.partial(self._connect, self._instances[peer.instance].agreement, peer, welcome, writing, process)

    def _connect(
        self, agreement: Agreement, peer: PeerRank, welcome: Welcome, writing: set[int], process: ProcessWatch | None
    ) -> RemoteRank:
        if short := shortage():
            raise PeerUnreachable(f"{peer}: {short}")
        placements = decode_placements(welcome.placements)
        _, regions = decode_endpoint(self._backend.name, welcome.endpoint)
        plan, incoming = agreement.plans(self._local, peer.rank, placements, regions, peer=str(peer))
        lending = welcome.lending
        loans = None
        if lending is not None and self._pack_below:
            loans = Loans(lending.slot_nbytes, lending.first, regions, writing)
        if loans is None and not welcome.direct:
            raise PeerIncompatible(
                f"{peer} lets only its own process write rows, and no slots can be filled here: pack_below is 0"
            )
        process = process or self._attest(welcome.instance, welcome.rank, welcome.epoch)
        engine = self._backend.connect(welcome.endpoint, epoch=welcome.epoch, process=process)
        sums = functools.cache(lambda: agreement.checksum_plans(self._local, peer.rank, placements))
        try:
            gathers_from = self._backend.gathers_from(engine) if isinstance(self._backend, Gathering) else None
            prepared = prepare(self._backend, engine, plan) if welcome.direct else None
            if loans is None and prepared is None:
                _check_copied(plan, peer)
            pack = stream_maker(self._memory if self._pack_below and prepared is None else None, plan, source=True)
            unpack = stream_maker(self._memory if self._pack_below else None, incoming, source=False)
        except BaseException:
            self._backend.disconnect(engine)
            raise
        return RemoteRank(
            welcome.epoch,
            welcome.generation,
            engine,
            process,
            plan,
            incoming,
            loans,
            welcome.direct,
            has_small(incoming, self._pack_below),
            sums,
            prepared,
            pack,
            unpack,
            gathers_from,
        )

    def add(self, peer: PeerRank, rank: RemoteRank) -> None:
        found = self.peer(peer)
        found.remote = rank
        self._note_writer(found)
        logger.info("%s: %s is ready", self.me, peer)

    def writing(self, peer: PeerRank) -> Writing | None:
        """Sent before anything is written to a rank; `None` if there is only one engine."""
        rank = self.rank(peer)
        if rank is None or not isinstance(self._backend, SeveralEngines):
            return None
        engine = self._backend.engine_to(rank.engine)
        return Writing(engine=engine, epoch=self._identity.epoch, generation=rank.generation)

    def written_by(self, peer: PeerRank, said: Writing) -> None:
        found = self.peer(peer)
        found.writing = said
        self._note_writer(found)

    def _note_writer(self, peer: Peer) -> None:
        rank, said = peer.remote, peer.writing
        if rank is None or said is None or not isinstance(self._backend, SeveralEngines):
            return
        if (said.epoch, said.generation) == (rank.epoch, rank.generation):
            self._backend.written_by(rank.engine, said.engine)

    def forget(self, instance: str) -> None:
        found = self._instances.get(instance)
        if found is not None and not found.connected():
            del self._instances[instance]
            for peer in [each for each, writing in self._writing.items() if each.instance == instance and not writing]:
                del self._writing[peer]

    def discard(self, peer: PeerRank, rank: RemoteRank) -> None:
        try:
            self._backend.disconnect(rank.engine)
        except Exception as error:  # noqa: BLE001 (whatever it is, it concerns this peer only)
            logger.warning("%s: disconnecting %s: %s: %s", self.me, peer, type(error).__name__, error)

    def disconnect(self, peer: PeerRank, epoch: int) -> RemoteRank | None:
        """The disconnected rank, whose engine must be fenced; `None` if it was not connected."""
        found = self.peer(peer)
        rank = found.remote
        if rank is None or rank.epoch != epoch:
            return None
        found.remote = None
        if rank.loans is not None:
            rank.loans.close()
        self.discard(peer, rank)
        return rank


def _check_copied(plan: TransferPlan, peer: PeerRank) -> None:
    """Numbers are converted while they are packed; copies alone cannot."""
    if plan.converted:
        raise PeerIncompatible(
            f"{peer}, component {plan.converted[0]!r}: expected slots on both sides, since numbers are converted while they "
            "are packed; found none: pack_below is 0, or is 0 by default for this engine"
        )
