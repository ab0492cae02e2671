"""`KVManager`: what a server embeds."""

from __future__ import annotations

import importlib.metadata
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from disagg.arguments import (
    GivenRows,
    as_rows,
    check_deadline,
    check_number,
    check_text,
    check_timeout,
    request_key,
)
from disagg.backends.base import Backend, BackendOptions, RemotePeer
from disagg.construction import (
    admission,
    backend_options,
    check_joined,
    check_kinds,
    check_known,
    check_model,
    check_name,
    check_pack_below,
    check_peer,
    check_peers,
    check_topology,
    check_verify,
)
from disagg.core import _native
from disagg.core.address import dialable
from disagg.core.errors import PeerUnreachable
from disagg.core.events import ReadyEvent
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.layout.placement import Component
from disagg.protocol.messages import PROTOCOL_VERSION, TokenRange, Verify
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.peers import Admit
from disagg.protocol.types import Event, Limits, PeerRank
from disagg.requests import Receiver, Sender, check_alive, check_process
from disagg.runtime.accounting import Stats
from disagg.runtime.calls import ReceiveCall, open_receiver, open_sender, tell
from disagg.runtime.channel import Channel
from disagg.runtime.directory import PeerStatus
from disagg.runtime.health import Health, health_of, snapshot_of, unready
from disagg.runtime.keys import KeyPair
from disagg.runtime.metrics import Metrics, Reader
from disagg.runtime.metrics_server import MetricsServer
from disagg.runtime.runtime import Runtime, RuntimeSettings
from disagg.runtime.tracing import Tracing
from disagg.runtime.wire import Wire

logger = logging.getLogger(__name__)


def new_request_id() -> bytes:
    """A unique request id: 128 random bits."""
    return secrets.token_bytes(16)


class KVManager:
    """One rank's transfers. Only `wait_ready`, `drain` and `close` block, and `wait` of a request; every other call returns at
    once. Work happens in two supervised threads, and a third with `verify`.

    `name` names the instance, and is the same on all its ranks: 1 to 256 characters. `components` is the state of this rank, as
    `disagg.state` or `disagg.models` declares it over the server's memory; `topology` is needed only without
    components, since they have it (`None`: take theirs). `model` must be the same on both sides. `leader` is the control
    address of rank 0, which answers for the instance (`None` on rank 0 itself). `listen` is this rank's control address,
    `tcp://host:port`, where port 0 is any. If that is every interface, `advertise` is the address for peers, and its host is
    also where they reach the engine. Off loopback the control channel takes `keys`, or `insecure=True`; an engine whose data
    travels over open TCP takes `trusted_network=True` as well.
    `peers` are configured before anything is answered: the addresses of their leaders by name, and with keys their public keys
    (40 characters of Z85) in `peer_keys`. `add_peer` adds others later.

    `backend` is the engine: `"auto"`, `"cma"`, `"nixl"`, `"mooncake"`, `"nvlink"`, `"local"`, one of an installed package, or
    a function that makes one. It may use `transport` (`"auto"`, `"rdma"`, `"tcp"`, `"shm"`) and the NICs `devices` (none named:
    any). With `require` it fails to start unless that transport is in use. `limits` bounds the protocol's queues and times, and
    `connection_limits` the times of the handshake and of liveness.

    `admit` says which other instances may connect: none (`"known"`), those with a key of `peer_keys` (`"keys"`), all (`"any"`),
    or those for which a function returns true. It gets an instance's name, its leader's address and its public key (empty
    without keys), and is called in a thread of the manager. An admitted instance is a peer until it has been away for
    `ConnectionLimits.forget_s`. A manager that only names addresses in its requests needs none of it; those that it
    names do. A rank other than 0 without a `leader` is told it later, by `set_leader`, and takes no request before.

    Pieces below `pack_below` bytes travel packed (0: never; `None`: the engine's own threshold). Peers of other hosts write
    slots that they are lent, and this rank copies them into its rows, so that no row waits for a proof that cannot come from
    there. With `direct_between_hosts` they write long pieces into rows: faster where a copy costs more than the link, but rows
    of a peer that ends in the middle of a request stay out of use until this manager is closed. `verify` says how much of what
    this rank receives is compared with what its writers sent: `"off"` or `"full"`.
    A forked child cannot use a manager of its parent: every call raises `LocalProtocolError`, and `close` does nothing.
    Build managers after forking.

    With `metrics_port` (0: any free port) Prometheus metrics are served at `metrics_url`, on the address `metrics_host`, and
    there whether it lives at `/healthz` and whether it takes requests at `/readyz`, without authentication. With
    `tracing` each request has OpenTelemetry spans, by the process's tracer provider.

    Raises `ConfigError` for settings that cannot be, `BackendUnavailable` if the engine cannot be used.
    """

    def __init__(
        self,
        *,
        name: str,
        components: Sequence[Component],
        topology: Topology | None = None,
        model: ModelId,
        backend: str | Callable[[BackendOptions], Backend] = "auto",
        listen: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        leader: str | None = None,
        peers: Mapping[str, str] | None = None,
        peer_keys: Mapping[str, str] | None = None,
        admit: Literal["known", "keys", "any"] | Admit = "known",
        keys: KeyPair | None = None,
        insecure: bool = False,
        trusted_network: bool = False,
        transport: str = "auto",
        devices: Sequence[str] = (),
        require: str | None = None,
        pack_below: int | None = None,
        direct_between_hosts: bool = False,
        verify: Verify = "off",
        limits: Limits | None = None,
        connection_limits: ConnectionLimits | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        tracing: bool = False,
    ) -> None:
        self.name, self.topology = check_name(name, "name"), check_topology(topology, components, leader=leader)
        self._keys, self._verify = keys, check_verify(verify)
        check_kinds(
            keys,
            limits,
            connection_limits,
            insecure=insecure,
            trusted_network=trusted_network,
            tracing=tracing,
            direct_between_hosts=direct_between_hosts,
        )
        metrics = Metrics()
        settings = RuntimeSettings(
            name=name,
            topology=self.topology,
            model=check_model(model),
            backend=backend,
            options=backend_options(listen, advertise, transport, devices, require, trusted_network),
            listen=listen,
            advertise=advertise,
            leader=leader,
            peers=check_peers(
                peers, peer_keys, own=name, own_addresses=(advertise or listen, listen, leader or listen), keys=keys
            ),
            admit=admission(admit, keys),
            any_key=callable(admit) or admit == "any",
            keys=keys,
            peer_keys=frozenset((peer_keys or {}).values()),
            insecure=insecure,
            pack_below=check_pack_below(pack_below),
            direct_between_hosts=direct_between_hosts,
            limits=limits or Limits(),
            connection_limits=connection_limits,
            metrics=None if metrics_port is None else metrics,
            tracing=Tracing() if tracing else None,
        )
        self._runtime = runtime = Runtime(settings, components)
        self.address = runtime.address
        """This rank's control address, `tcp://host:port`. That of rank 0 is what peers and other ranks are told."""
        try:
            self.metrics_url = None if metrics_port is None else _serve_metrics(runtime, metrics, metrics_host, metrics_port)
            runtime.start()
        except BaseException:
            runtime.abandon()
            raise
        logger.info(
            "%s: listening at %s, backend %s over %s, components %s%s",
            runtime.handshake.me, self.address, self.backend.name, self.backend.transport, ", ".join(c.name for c in
            components), f", metrics at {self.metrics_url}" if self.metrics_url else "",
        )  # fmt: skip

    def __enter__(self) -> KVManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- peers -------------------------------------------------------------------------------------------------------

    def add_peer(self, name: str, *, address: str, public_key: str | None = None) -> None:
        """Configure the peer instance `name` by the control `address` of its leader, and with keys by its `public_key`
        (40 characters of Z85). A new address or key replaces the old one.

        Raises `ConfigError` for a name, an address or a key that cannot be, and for the name or an address of this instance.
        """
        check_alive(self._runtime)
        self._runtime.directory.add(name, *self._check_peer(name, address, public_key))

    def remove_peer(self, name: str) -> None:
        """Forget a peer instance: requests with it fail, and it is not accepted any more."""
        check_alive(self._runtime)
        check_text(name, "peer")
        self._runtime.directory.remove(name)

    def peer(self, name: str) -> PeerStatus:
        """The state of a peer instance: `"unknown"`, `"connecting"`, `"ready"`, or `"refused"` for a reason that will not pass.
        Never blocks.
        """
        check_process(self._runtime)
        check_text(name, "peer")
        return self._runtime.directory.status(name)

    def set_leader(self, address: str) -> None:
        """Join this instance at its rank 0, whose address was not known when the manager was built.

        Raises `ConfigError` for an address that cannot be, on rank 0, and if the leader is known.
        """
        check_alive(self._runtime)
        dialable(address, what="leader")
        self._runtime.directory.set_leader(address)

    def wait_ready(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Wait until every rank of a peer has answered, plans are compared, and the engine is connected.

        Raises `PeerUnreachable` with the reason if that does not happen in time, and at once if one side has refused the other
        for a reason that will not pass, such as layouts that do not match.
        """
        check_process(self._runtime)
        check_text(name, "peer")
        status = self._runtime.directory.wait(name, check_timeout(timeout_s), has_ended=lambda: self._runtime.problem)
        check_alive(self._runtime)
        if status.state != "ready":
            how = "cannot become ready" if status.state == "refused" else f"is not ready after {timeout_s} s"
            raise PeerUnreachable(f"peer {name!r} {how}: {status.reason}")

    def engine(self, peer: str, rank: int) -> tuple[Backend, RemotePeer]:
        """The engine and its connection to one rank, to measure it without the protocol.

        Raises `PeerUnreachable` if that rank is not connected.
        """
        check_process(self._runtime)
        check_text(peer, "peer")
        remote = self._runtime.handshake.rank(PeerRank(peer, check_number(rank, "rank", 2**31)))
        if remote is None:
            raise PeerUnreachable(f"peer {peer!r}, rank {rank}: {self._runtime.directory.problem(peer)}")
        return self.backend, remote.engine

    # -- requests ----------------------------------------------------------------------------------------------------

    def receiver(
        self,
        request_id: bytes,
        *,
        peer: str,
        address: str | None = None,
        public_key: str | None = None,
        rows: GivenRows,
        need: Mapping[str, TokenRange] | None = None,
        group: int = 0,
        attempt: int = 0,
        deadline_s: float | None = 60.0,
        ready: ReadyEvent | None = None,
        tag: Any = None,
        label: str = "",
    ) -> Receiver:
        """Reserve `rows` for a request that `peer`'s `group` will send. `need` gives, for each component of pages, the tokens
        `[start, stop)` of the request that this rank needs. A slot is always needed whole. `request_id`, 16 bytes, is the same
        on both sides, and `attempt` is new for each try. After `deadline_s` seconds the request fails with `RequestTimeout`.
        Its event has the `tag`.

        A peer that is not ready is waited for, within the deadline (`None`: without one). An unknown peer is added, if its
        leader's `address` is given, with keys also its `public_key`. Such a peer is forgotten after it has been away for
        `ConnectionLimits.forget_s`, and at once if nobody listens at its address; the requests that wait for it fail.
        Nothing is reserved before `ready` has passed. `label` is the server's own name of the request, for the log.

        Raises `PeerUnreachable` for an unknown peer without an address, or one too many, `LayoutError` for rows that cannot
        hold the needed tokens, `LocalProtocolError` for an argument of the wrong type, for an attempt that is under way, for
        rows that another request receives or sends and whose lease is held, and on a rank that does not know its leader. What
        shows later fails the request, with cause `invalid` for an attempt that has ended before.
        """
        self._make_known(peer, address, public_key)
        return open_receiver(
            self._runtime,
            ReceiveCall(
                key=request_key(request_id, attempt),
                peer=peer,
                rows=as_rows(self._runtime.local, rows),
                need={} if need is None else need,
                group=group,
                deadline_s=check_deadline(deadline_s),
                ready=ready,
                verify=self._verify,
                tag=tag,
                label=label,
            ),
        )

    def sender(
        self,
        request_id: bytes,
        *,
        peer: str | None = None,
        attempt: int | None = 0,
        deadline_s: float | None = 60.0,
        tag: Any = None,
        label: str = "",
    ) -> Sender:
        """Serve a request to `peer`, whichever of its groups reserves it; with `peer=None` to the instance that reserves it
        first. With `attempt=None` the reservation says which attempt it is. Rows may be sent before or after the reserve.
        `request_id`, `deadline_s`, `tag` and `label` are those of `receiver`; `deadline_s` counts from this call.

        Raises `LocalProtocolError` for an argument of the wrong type, for an attempt that is under way, and on a rank that does
        not know its leader. An attempt that has ended before fails the request, with cause `invalid`.
        """
        check_alive(self._runtime)
        check_joined(self._runtime.directory, self.name, self.topology)
        if peer is not None:
            check_known(self._runtime.directory, peer, may_connect=True)
        return open_sender(
            self._runtime,
            request_key(request_id, 0 if attempt is None else attempt),
            peer=peer or "",
            any_attempt=attempt is None,
            deadline_s=check_deadline(deadline_s),
            tag=tag,
            label=label,
        )

    def decline(
        self,
        request_id: bytes,
        *,
        peer: str,
        address: str | None = None,
        public_key: str | None = None,
        group: int = 0,
        attempt: int = 0,
    ) -> None:
        """Tell `peer`'s `group` that this rank needs nothing of a request: its sender ends well, and its rows are released.
        The arguments are those of `receiver`.

        Each rank that would have opened a receiver says so. It is sent once, when the peer is ready. Raises as `receiver` does.
        """
        self._make_known(peer, address, public_key)
        tell(self._runtime, self._runtime.sessions.decline, request_key(request_id, attempt), peer=peer, group=group)

    def want(
        self,
        request_id: bytes,
        *,
        peer: str,
        address: str | None = None,
        public_key: str | None = None,
        group: int = 0,
        attempt: int = 0,
    ) -> None:
        """Tell `peer`'s `group` that this rank still wants a request for which it has no rows yet. `Sender.wanted_at` shows it:
        the peer may keep the request for longer. It is sent once, when the peer is ready. The arguments are
        those of `receiver`. Raises as `receiver` does.
        """
        self._make_known(peer, address, public_key)
        tell(self._runtime, self._runtime.sessions.want, request_key(request_id, attempt), peer=peer, group=group)

    def events(self) -> list[Event]:
        """Every request that has ended since the last call, but those that a task has awaited. If there is none, this yields
        the GIL to the manager's threads while they have work, for up to 1 ms, and at most half of the time.
        """
        check_process(self._runtime)
        if not self._runtime.requests.num_events:
            _native.yield_gil()
        return self._runtime.requests.take_events()

    def fileno(self) -> int:
        """A descriptor that is readable while `events` has something to return."""
        check_process(self._runtime)
        return self._runtime.requests.fileno()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        """The engine; its `name` and `transport` say how peers are reached."""
        return self._runtime.backend

    @property
    def stats(self) -> Stats:
        """Statistics of the transfers that this rank has started."""
        return self._runtime.stats

    def health(self) -> Health:
        """The state now. Never blocks."""
        return health_of(self._runtime)

    def drain(self, *, timeout_s: float) -> bool:
        """Take no new requests, and wait for those under way. Returns whether all have ended within
        `timeout_s` seconds.
        """
        check_process(self._runtime)
        return self._runtime.requests.drain(check_timeout(timeout_s))

    def close(self) -> None:
        """Say goodbye to peers, end open requests, and stop the threads and the engine. A second call waits for the first.

        If the engine's end proves all rows quiet, quarantined rows are released as well. Otherwise keep the pools that hold
        them in memory: a stopped peer may still write there. In a callback, which runs in a thread of the manager, this returns
        at once, and another thread closes the manager; a call in the server's thread waits for it.
        """
        self._runtime.close()

    def interpose(self, wrap: Callable[[Channel], Wire]) -> None:
        """Put something between this manager and its control channel, as `disagg.testing.faults.mistreat` does; once."""
        check_process(self._runtime)
        self._runtime.interpose(wrap)

    def _check_peer(self, name: str, address: str, public_key: str | None) -> tuple[str, str | None]:
        own = self.address, self._runtime.channel.address, self._runtime.peers.leader_address or self.address
        return check_peer(name, address, public_key, own=self.name, own_addresses=own, keys=self._keys)

    def _make_known(self, peer: str, address: str | None, public_key: str | None) -> None:
        """Add an unknown peer by its address, or one that has moved. Raises `PeerUnreachable` for one without."""
        check_alive(self._runtime)
        check_joined(self._runtime.directory, self.name, self.topology)
        check_text(peer, "peer")
        if address is not None and self._runtime.directory.lacks(peer, address):
            self._runtime.directory.add(peer, *self._check_peer(peer, address, public_key), lasting=False)
        check_known(self._runtime.directory, peer, may_connect=False)


def _serve_metrics(runtime: Runtime, metrics: Metrics, host: str, port: int) -> str:
    me = runtime.handshake.me
    build = {
        "version": importlib.metadata.version("disagg"),
        "protocol": str(PROTOCOL_VERSION),
        "name": me.instance,
        "rank": str(me.rank),
        "backend": runtime.backend.name,
    }
    reader = Reader(
        lambda: snapshot_of(runtime),
        lambda: {**build, "transport": runtime.backend.transport},  # known once there is a peer
    )
    metrics.registry.register(reader)
    server = MetricsServer(metrics.registry, lambda: runtime.problem, lambda: unready(runtime), host=host, port=port)
    runtime.add_on_close(server.close)
    return server.url
