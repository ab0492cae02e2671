"""`KVManager`: what a server embeds."""

from __future__ import annotations

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
    check_count,
    check_joined,
    check_kinds,
    check_known,
    check_model,
    check_name,
    check_peer,
    check_peers,
    check_port,
    check_topology,
    check_verify,
)
from disagg.core import _native
from disagg.core.address import dialable
from disagg.core.errors import LocalProtocolError, PeerUnreachable
from disagg.core.events import ReadyEvent
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.layout.placement import Component
from disagg.protocol.messages import TokenRange, Verify
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.peers import Admit
from disagg.protocol.types import Event, Limits, PeerRank
from disagg.requests import Receiver, Sender, check_alive, check_may_block, check_process
from disagg.runtime.accounting import Stats
from disagg.runtime.calls import open_receiver, open_sender, tell
from disagg.runtime.channel import Channel
from disagg.runtime.directory import PeerStatus
from disagg.runtime.health import Health, Reader, health_of, unready
from disagg.runtime.keys import KeyPair
from disagg.runtime.metrics import Metrics
from disagg.runtime.metrics_server import MetricsServer
from disagg.runtime.runtime import Runtime, RuntimeSettings
from disagg.runtime.tracing import Tracing
from disagg.runtime.wire import Wire

logger = logging.getLogger(__name__)


def new_request_id() -> bytes:
    """A unique request id: 128 random bits."""
    return secrets.token_bytes(16)


class KVManager:
    """One rank's transfers. Only `wait_ready`, `drain`, `close` and `wait` of a request block. Once the manager has ended,
    calls that begin something raise `LocalProtocolError`. A forked child cannot use its parent's manager: all calls raise
    `LocalProtocolError`, and `close` does nothing.

    `name` is the instance's, the same on all its ranks: 1 to 256 characters. `components` is this rank's state, as
    `disagg.state` or `disagg.models` declares it over the server's memory. `topology` is needed only without components.
    `model` must be the same on both sides.

    `listen` is this rank's control address, `tcp://host:port`; port 0 is any. If it is every interface, peers need
    `advertise`, whose host is also the engine's. `leader` is the control address of rank 0 (`None` on rank 0); without it
    another rank takes no request before `set_leader`. Off loopback the control channel needs `keys` or `insecure=True`, and an
    engine over open TCP needs `trusted_network=True`.

    `peers` gives the addresses of other instances' leaders by name, and `peer_keys` their public keys (40 characters of
    Z85); `add_peer` adds others later. `admit` says which other instances may connect: none (`"known"`), those with a key
    of `peer_keys` (`"keys"`), all (`"any"`), or those for which a function returns true. The function gets the instance's
    name, its leader's address and its public key (empty without keys), in a thread of the manager. An admitted instance is
    a peer until it has been away for `ConnectionLimits.forget_s`. A manager that only names addresses in its requests needs
    no `admit`; the managers that it names do.

    `backend` is the engine: `"auto"`, `"cma"`, `"nixl"`, `"mooncake"`, `"nvlink"`, `"local"`, one of an installed package,
    or a function that makes one. It may use `transport` (`"auto"`, `"rdma"`, `"tcp"`, `"shm"`) and the NICs `devices`
    (empty: any). With `require` it fails to start unless that transport is in use. `limits` bounds the protocol's queues
    and times, `connection_limits` the times of the handshake and of liveness.

    Pieces below `pack_below` bytes travel packed (0: never; `None`: the engine's threshold). Unless that is 0, peers on
    other hosts write slots that this rank copies into its rows, since there is no proof from there that a lost peer writes
    no more. With `direct_between_hosts` peers on other hosts write long pieces into rows: faster where a copy costs more than
    the link, but the rows of a peer that is lost during a request stay out of use until `close`. Buffers to pack into and
    slots for all peers have `staging_nbytes` together (`None`: 256 MiB of the GPU that the pools are on, or 64 to 160 MiB of
    the host, by engine), allocated at the start; a single peer is faster with more. `verify="full"` compares checksums of
    everything that this rank receives with those of what was sent; `"off"` compares nothing.

    With `metrics_port` (0: any free port) Prometheus metrics are served at `metrics_url`, on the address `metrics_host`,
    beside `/healthz` and `/readyz`, without authentication. With `tracing` each request has OpenTelemetry spans, by the
    process's tracer provider.

    Raises `ConfigError` for invalid settings, `BackendUnavailable` if the engine cannot be used.
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
        staging_nbytes: int | None = None,
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
            name=self.name,
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
            pack_below=check_count(pack_below, "pack_below", "a number of bytes"),
            staging_nbytes=check_count(staging_nbytes, "staging_nbytes", "a number of bytes"),
            direct_between_hosts=direct_between_hosts,
            limits=limits or Limits(),
            connection_limits=connection_limits,
            metrics=None if check_port(metrics_port, metrics_host) is None else metrics,
            tracing=Tracing() if tracing else None,
        )
        self._runtime = runtime = Runtime(settings, components)
        self.address = runtime.address
        """This rank's control address, `tcp://host:port`. Peers and other ranks are given that of rank 0."""
        try:
            self.metrics_url = None if metrics_port is None else _serve_metrics(runtime, metrics, metrics_host, metrics_port)
            runtime.start()
        except BaseException:
            runtime.opened.close()
            raise
        logger.info(
            "%s: listening at %s, backend %s over %s, components %s, %d MiB of slots and packing buffers%s",
            runtime.handshake.me, self.address, self.backend.name, self.backend.transport, ", ".join(c.name for c in
            components), runtime.staging_nbytes >> 20, f", metrics at {self.metrics_url}" if self.metrics_url else "",
        )  # fmt: skip

    def __enter__(self) -> KVManager:
        check_alive(self._runtime)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- peers -------------------------------------------------------------------------------------------------------

    def add_peer(self, name: str, *, address: str, public_key: str | None = None) -> None:
        """Configure the peer instance `name` by its leader's control `address`, and with keys by its `public_key` (40
        characters of Z85). A new address or key replaces the old one. Raises `ConfigError` for invalid arguments, and for
        this instance's own name or address.
        """
        check_alive(self._runtime)
        self._runtime.directory.add(name, *self._check_peer(name, address, public_key))

    def remove_peer(self, name: str) -> None:
        """Forget a peer instance: requests with it fail, and it is not accepted any more."""
        check_alive(self._runtime)
        check_text(name, "peer")
        self._runtime.directory.remove(name)

    def peer(self, name: str) -> PeerStatus:
        """Its state is `"unknown"`, `"connecting"`, `"ready"`, or `"refused"` for a reason that will not pass."""
        check_process(self._runtime)
        check_text(name, "peer")
        problem = self._runtime.problem
        return PeerStatus("refused", f"the manager has ended: {problem}") if problem else self._runtime.directory.status(name)

    def set_leader(self, address: str) -> None:
        """Join rank 0, if the manager was built without `leader`. Raises `ConfigError` for an invalid address, on rank 0,
        and if the leader is known.
        """
        check_alive(self._runtime)
        dialable(address, what="leader")
        self._runtime.directory.set_leader(address)

    def wait_ready(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Wait until every rank of a peer has answered, plans are compared, and the engine is connected. Raises
        `PeerUnreachable` with the reason after `timeout_s` seconds, and at once for a reason that will not pass, such as
        layouts that do not match; `LocalProtocolError` unless `timeout_s` is finite and at least 0, and in a callback.
        """
        check_may_block(self._runtime, "wait_ready")
        check_text(name, "peer")
        status = self._runtime.directory.wait(name, check_timeout(timeout_s), has_ended=lambda: self._runtime.problem)
        check_alive(self._runtime)
        if status.state != "ready":
            how = "cannot become ready" if status.state == "refused" else f"is not ready after {timeout_s} s"
            raise PeerUnreachable(f"peer {name!r} {how}: {status.reason}")

    def engine(self, peer: str, rank: int) -> tuple[Backend, RemotePeer]:
        """The engine and its connection to one rank, to measure it without the protocol. Raises `PeerUnreachable` if that
        is not connected.
        """
        check_alive(self._runtime)
        check_text(peer, "peer")
        remote = self._runtime.handshake.rank(PeerRank(peer, check_number(rank, "rank", 2**31)))
        if remote is None:
            reason = self._runtime.directory.problem(peer) or "this rank does not connect to it"
            raise PeerUnreachable(f"peer {peer!r}, rank {rank}: {reason}")
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
        """Reserve `rows` for a request that `peer`'s `group` will send. `need` gives the tokens `[start, stop)` that this
        rank needs of each component of pages; a slot is always needed whole. `request_id`, 16 bytes, is the same on both
        sides, and `attempt` is new for each try. After `deadline_s` seconds (`None`: never) the request fails with
        `RequestTimeout`. Nothing is reserved before `ready` has passed. The event has the `tag`; `label` is the server's
        name of the request, for the log.

        The request waits for a peer that is not ready. An unknown peer is added if its leader's `address` is given, with
        keys also its `public_key`. It is forgotten after it has been away for `ConnectionLimits.forget_s`, and at once if
        nobody listens at its address; requests that wait for it fail.

        Raises `PeerUnreachable` for an unknown peer without an address, or one too many; `ConfigError` for an invalid
        address or key; `LayoutError` for rows that cannot hold the needed tokens; `LocalProtocolError` for another invalid
        argument, an attempt that is under way, rows that another request holds, after `drain`, and on a rank that does not
        know its leader. Later errors fail the request, with cause `invalid` for an attempt that has ended before.
        """
        self._make_known(peer, address, public_key)
        return open_receiver(
            self._runtime,
            request_key(request_id, attempt),
            peer=peer,
            rows=as_rows(self._runtime.local, rows),
            need={} if need is None else need,
            group=group,
            deadline_s=check_deadline(deadline_s),
            ready=ready,
            verify=self._verify,
            tag=tag,
            label=label,
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
        """Serve a request to `peer`, whichever of its groups reserves it; with `peer=None` to the first instance that does.
        With `attempt=None` the reservation sets the attempt. Rows may be sent before the reserve. `request_id`,
        `deadline_s` (from this call), `tag` and `label` are those of `receiver`.

        Raises `LocalProtocolError` as `receiver` does, `PeerUnreachable` for an unknown peer that `admit` excludes. An
        attempt that has ended before fails the request, with cause `invalid`.
        """
        check_alive(self._runtime)
        check_joined(self._runtime.directory, self.name, self.topology)
        if peer is not None:
            if peer == "":
                raise LocalProtocolError("peer: expected a name, or None for any, found ''")
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
        """Tell `peer`'s `group` that this rank needs nothing of a request, so that its sender succeeds. Each rank that
        would have opened a receiver calls it. It is sent once the peer is ready, within 60 s. Arguments and errors are those
        of `receiver`.
        """
        self._make_known(peer, address, public_key)
        group = self._group(peer, group)
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
        """Tell `peer`'s `group` that this rank still wants a request for which it has no rows yet, so that the peer may
        keep it (`Sender.wanted_at`). It is sent once the peer is ready, within 60 s. Arguments and errors are those of
        `receiver`.
        """
        self._make_known(peer, address, public_key)
        group = self._group(peer, group)
        tell(self._runtime, self._runtime.sessions.want, request_key(request_id, attempt), peer=peer, group=group)

    def _group(self, peer: str, group: int) -> int:
        known = self._runtime.directory.agreement(peer)
        return check_number(group, f"group of peer {peer!r}", 2**31 if known is None else known.num_groups)

    def events(self) -> list[Event]:
        """Every request that has ended since the last call, except those that a task has awaited. Call it at intervals, also if
        you learn the ends in another way: until then each takes some KiB. If there is none, this yields the GIL to the
        manager's threads while they have work, for up to 1 ms, and at most half of the time.
        """
        check_process(self._runtime)
        if not self._runtime.requests.num_events:
            _native.yield_gil()
        return self._runtime.requests.take_events()

    def fileno(self) -> int:
        """Readable while `events` has something to return; -1 once the manager is closed. Stop watching it before `close`, and
        call `events` once more after that.
        """
        check_process(self._runtime)
        return self._runtime.requests.fileno()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        return self._runtime.backend

    @property
    def stats(self) -> Stats:
        """Of the transfers that this rank has started."""
        return self._runtime.stats

    def health(self) -> Health:
        return health_of(self._runtime)

    def drain(self, *, timeout_s: float) -> bool:
        """Take no new requests, and wait up to `timeout_s` seconds for those under way. Returns whether all have ended.
        Raises `LocalProtocolError` unless `timeout_s` is finite and at least 0, and in a callback.
        """
        check_may_block(self._runtime, "drain")
        return self._runtime.requests.drain(check_timeout(timeout_s))

    def close(self) -> None:
        """Say goodbye to peers, end open requests, and stop the threads and the engine. A second call waits for the first.
        Another thread closes, and runs the callbacks of requests that end thereby: hold no lock that they take. In a callback
        this returns at once. In a handler of a signal it may wait for ever, as all that takes locks: set a flag there.

        If the engine's end proves all rows quiet, quarantined rows are released as well. Otherwise keep their pools in
        memory: a stopped peer may still write there.
        """
        self._runtime.lifetime.end()

    def interpose(self, wrap: Callable[[Channel], Wire]) -> None:
        """Wrap the control channel, as `disagg.testing.faults.mistreat` does. Raises `LocalProtocolError` the second time."""
        check_process(self._runtime)
        self._runtime.interpose(wrap)

    def _check_peer(self, name: str, address: str, public_key: str | None) -> tuple[str, str | None]:
        own = self.address, self._runtime.channel.address, self._runtime.peers.leader_address or self.address
        return check_peer(name, address, public_key, own=self.name, own_addresses=own, keys=self._keys)

    def _make_known(self, peer: str, address: str | None, public_key: str | None) -> None:
        """Add an unknown peer by its address, or update one that has moved."""
        check_alive(self._runtime)
        check_joined(self._runtime.directory, self.name, self.topology)
        check_text(peer, "peer")
        if address is not None and self._runtime.directory.lacks(peer, address):
            self._runtime.directory.add(peer, *self._check_peer(peer, address, public_key), lasting=False)
        check_known(self._runtime.directory, peer, may_connect=False)


def _serve_metrics(runtime: Runtime, metrics: Metrics, host: str, port: int) -> str:
    metrics.registry.register(Reader(runtime))
    server = MetricsServer(metrics.registry, lambda: runtime.problem, lambda: unready(runtime), host=host, port=port)
    runtime.opened.callback(server.close)
    return server.url
