"""`KVManager`: what a server embeds."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from disagg.arguments import (
    check_deadline,
    check_kinds,
    check_needs,
    check_number,
    check_ready,
    check_text,
    check_timeout,
    request_key,
)
from disagg.backends.base import Backend, BackendOptions, RemotePeer, Transport
from disagg.core import _native
from disagg.core.address import dialable, is_loopback, is_wildcard, parse_address
from disagg.core.errors import ConfigError, LocalProtocolError, PeerUnreachable
from disagg.core.events import ReadyEvent
from disagg.core.rows import MAX_NAME, Rows
from disagg.core.topology import Topology
from disagg.layout.agreement import Agreement, ModelId
from disagg.layout.placement import Component
from disagg.protocol.messages import TokenRange, Verify
from disagg.protocol.peer_state import ConnectionLimits
from disagg.protocol.types import Event, Limits, PeerRank
from disagg.requests import Receiver, Sender, check_alive, check_process
from disagg.runtime.accounting import Session, Stats
from disagg.runtime.channel import Channel
from disagg.runtime.health import Health, health_of, snapshot_of
from disagg.runtime.keys import KeyPair, check_key
from disagg.runtime.metrics import Metrics
from disagg.runtime.metrics_server import MetricsServer
from disagg.runtime.runtime import Runtime, RuntimeSettings
from disagg.runtime.wire import Wire

logger = logging.getLogger(__name__)


def new_request_id() -> bytes:
    """A unique request id: 128 random bits."""
    return secrets.token_bytes(16)


class KVManager:
    """One rank's transfers. Only `wait_ready`, `drain` and `close` block, and `wait` of a request; every other call returns at
    once. Work happens in two supervised threads, and a third with `verify`.

    `name` names the instance, and is the same on all its ranks. `leader` is the control address of rank 0, which answers for
    the instance (`None` on rank 0 itself). `listen` is this rank's control address, `tcp://host:port`. If that is every
    interface, `advertise` is the address for peers, and its host is also where they reach the engine. Off loopback the control
    channel takes `keys`, or `insecure=True`; an engine whose data travels over open TCP takes `trusted_network=True` as well.
    `peers` are configured before anything is answered: the addresses of their leaders by name, and with keys their public keys
    in `peer_keys`. `add_peer` adds others later.

    Pieces below `pack_below` bytes travel packed (0: never; `None`: the engine's own threshold). `verify` says how much of what
    this rank receives is compared with what its writers sent: `"off"`, some pages of each request (`"sample"`), or `"full"`.
    A forked child cannot use a manager of its parent: every call raises `LocalProtocolError`, and `close` does nothing.
    Build managers after forking.

    With `metrics_port` (0: any free port) Prometheus metrics are served at `metrics_url`, and the health at `/healthz` there,
    without authentication.

    Raises `ConfigError` for settings that cannot be, `BackendUnavailable` if the engine cannot be used.
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
        peers: Mapping[str, str] | None = None,
        peer_keys: Mapping[str, str] | None = None,
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
        self.name, self.topology = _check_name(name, "name"), topology
        self._verify = _check_verify(verify)
        if leader is None and topology.rank != 0:
            raise ConfigError(f"leader: rank {topology.rank} of {topology.num_ranks} needs the address of rank 0")
        settings = RuntimeSettings(
            name=name,
            topology=topology,
            model=model,
            backend=backend,
            options=_options(listen, advertise, transport, devices, require, trusted_network),
            listen=listen,
            advertise=advertise,
            leader=leader,
            peers={n: _check_peer(n, a, (peer_keys or {}).get(n), own=name, keys=keys) for n, a in (peers or {}).items()},
            keys=keys,
            insecure=insecure,
            pack_below=pack_below,
            limits=limits or Limits(),
            connection_limits=connection_limits,
        )
        self._keys = keys
        self._draining = False
        self._runtime = runtime = Runtime(settings, components)
        self.address = runtime.address
        try:
            self.metrics_url = None if metrics_port is None else self._serve_metrics(metrics_host, metrics_port)
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
        """Configure a peer instance by the control address of its leader. A new address or key replaces the old one.

        Raises `ConfigError` for a name, an address or a key that cannot be.
        """
        check_alive(self._runtime)
        _check_peer(name, address, public_key, own=self.name, keys=self._keys)
        if public_key is not None:
            self._runtime.allowed_keys.add(public_key)
        self._runtime.command(lambda now: self._runtime.peers.add_peer(name, address, public_key, now))

    def wait_ready(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Wait until every rank of a peer has answered, plans are compared, and the engine is connected.

        Raises `PeerUnreachable` with the reason if that does not happen in time, and at once if one side has refused the other
        for a reason that will not pass, such as layouts that do not match.
        """
        check_process(self._runtime)
        check_text(name, "peer")
        runtime, longest_s = self._runtime, min(check_timeout(timeout_s), threading.TIMEOUT_MAX)
        with runtime.changed:
            runtime.changed.wait_for(lambda: runtime.is_ready(name) or runtime.problem or runtime.refusal(name), longest_s)
        check_alive(runtime)
        if not runtime.is_ready(name) and (refusal := runtime.refusal(name)):
            raise PeerUnreachable(f"peer {name!r} cannot become ready: {refusal}")
        if not runtime.is_ready(name):
            raise PeerUnreachable(f"peer {name!r} is not ready after {timeout_s} s: {runtime.peer_problem(name)}")

    def engine(self, peer: str, rank: int) -> tuple[Backend, RemotePeer]:
        """The engine and its connection to one rank, to measure it without the protocol.

        Raises `PeerUnreachable` if that rank is not connected.
        """
        check_process(self._runtime)
        remote = self._runtime.handshake.rank(PeerRank(peer, rank))
        if remote is None:
            raise PeerUnreachable(f"peer {peer!r}, rank {rank}: {self._runtime.peer_problem(peer)}")
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
        """Reserve rows for a request that `peer`'s `group` will send. `need` gives, for each component of pages, the tokens
        `[start, stop)` of the request that this rank needs. A slot is always needed whole.

        Nothing is reserved before `ready` has passed. Raises `PeerUnreachable` if the peer is not ready, `LayoutError` for rows
        that cannot hold the needed tokens, `LocalProtocolError` for an argument of the wrong type, for an attempt that was used
        before, and for rows that another receive needs and whose lease is not released.
        """
        runtime, agreement = self._runtime, self._agreement(peer)
        deadline_s = check_deadline(deadline_s)
        check_ready(ready)
        group = check_number(group, f"group of peer {peer!r}", agreement.num_groups)
        check_kinds(runtime.local, rows)
        agreed = agreement.incoming.components
        needed, ids = check_needs(runtime.local, self.topology.group_rank, agreed, rows, {} if need is None else need)
        receiver = Receiver(runtime, request_key(request_id, attempt), peer, tag, need=needed, ids=ids)
        expected, rows = agreement.expected(runtime.local, group, needed), dict(rows)

        def open_session(now: float) -> Session:
            session = receiver.session = runtime.sessions.receives.open(
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
            if ready is not None:
                runtime.dispatch.reserve_when_ready(session, ready)
            return session

        runtime.open(receiver, open_session)
        return receiver

    def sender(self, request_id: bytes, *, peer: str, attempt: int = 0, deadline_s: float = 60.0, tag: Any = None) -> Sender:
        """Serve a request to `peer`, whichever of its groups reserves it. Rows may be sent before or after the reserve.

        Raises `PeerUnreachable` if the peer is not ready, `LocalProtocolError` for an argument of the wrong type, and for an
        attempt that was used before.
        """
        runtime, agreement = self._runtime, self._agreement(peer)
        deadline_s = check_deadline(deadline_s)
        sender = Sender(runtime, request_key(request_id, attempt), peer, tag)

        def open_session(now: float) -> Session:
            session = sender.session = runtime.sessions.sends.open(
                sender.key,
                peer=peer,
                expected=agreement.readers(runtime.local),
                peer_group_size=agreement.group_size,
                now=now,
                deadline=now + deadline_s,
                tag=tag,
            )
            return session

        runtime.open(sender, open_session)
        return sender

    def events(self) -> list[Event]:
        """Every request that has ended since the last call. If there is none, this yields the GIL to the manager's threads if
        they have work, for up to 100 us.
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
        return self._runtime.backend

    @property
    def stats(self) -> Stats:
        """Statistics of the transfers that this rank has started."""
        return self._runtime.stats

    def health(self) -> Health:
        """The state now. Never blocks."""
        return health_of(self._runtime)

    def drain(self, *, timeout_s: float) -> bool:
        """Take no new requests, and wait for those under way. Returns whether all have ended in time."""
        check_process(self._runtime)
        deadline = time.monotonic() + check_timeout(timeout_s)
        self._draining = True
        for handle in self._runtime.requests.open_handles():
            with contextlib.suppress(TimeoutError):
                handle.wait(timeout_s=max(0.0, deadline - time.monotonic()))
        return not self._runtime.requests.open_handles()

    def close(self) -> None:
        """Say goodbye to peers, end open requests, and stop the threads and the engine. A second call waits for the first.

        If the engine's end proves all rows quiet, quarantined rows are released as well. In a callback, which runs in a thread
        of the manager, this returns at once, and another thread closes the manager; a call in the server's thread waits for it.
        """
        self._runtime.close()

    def interpose(self, wrap: Callable[[Channel], Wire]) -> None:
        """Put something between this manager and its control channel, as `disagg.testing.faults.mistreat` does; once."""
        check_process(self._runtime)
        self._runtime.interpose(wrap)

    def _agreement(self, peer: str) -> Agreement:
        check_alive(self._runtime)
        check_text(peer, "peer")
        if self._draining:
            raise LocalProtocolError("the manager is draining: it takes no new requests")
        agreement = self._runtime.handshake.agreement(peer)
        if agreement is None or not self._runtime.is_ready(peer):
            raise PeerUnreachable(f"peer {peer!r} is not ready: {self._runtime.peer_problem(peer)}")
        return agreement

    def _serve_metrics(self, host: str, port: int) -> str:
        metrics = self._runtime.requests.metrics = Metrics(lambda: snapshot_of(self._runtime))
        server = MetricsServer(metrics.registry, lambda: self._runtime.problem, host=host, port=port)
        self._runtime.add_on_close(server.close)
        return server.url


def _options(
    listen: str, advertise: str | None, transport: str, devices: Sequence[str], require: str | None, trusted_network: bool
) -> BackendOptions:
    """The engine's options."""
    host, _ = parse_address(advertise or listen, what="advertise" if advertise else "listen")
    if is_wildcard(host):
        raise ConfigError(
            f"listen: {listen!r} is every interface; set advertise=tcp://host:port to an address that peers can reach"
        )
    return BackendOptions(
        host=host,
        transport=_transport(transport, "transport"),
        devices=tuple(devices),
        require=None if require is None else _transport(require, "require"),
        trusted_network=trusted_network or is_loopback(host),
    )


def _check_peer(name: str, address: str, public_key: str | None, *, own: str, keys: KeyPair | None) -> tuple[str, str | None]:
    """The address and the key of a peer, checked."""
    _check_name(name, "peer")
    dialable(address, what=f"peer {name!r}")
    if name == own:
        raise ConfigError(f"peer: {name!r} is this instance's own name")
    if keys is not None and public_key is None:
        raise ConfigError(f"peer {name!r}: this instance has keys, so the peer's public key is needed")
    if public_key is not None:
        check_key(public_key, what=f"peer {name!r}, public key")
    return address, public_key


def _check_name(name: object, what: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ConfigError(f"{what}: expected a str of 1 to {MAX_NAME} characters, found {name!r}")
    return name


def _check_verify(value: Verify) -> Verify:
    if value not in get_args(Verify):
        raise ConfigError(f"verify: expected one of {', '.join(get_args(Verify))}, found {value!r}")
    return value


def _transport(value: str, what: str) -> Transport:
    try:
        return Transport(value)
    except ValueError:
        raise ConfigError(f"{what}: expected one of {', '.join(t.value for t in Transport)}, found {value!r}") from None
