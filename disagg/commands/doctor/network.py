"""Whether a peer's port can be reached, and whether it is a control port."""

from __future__ import annotations

import contextlib
import errno
import socket
import time

from disagg.core.address import bracketed, is_loopback, parse_address
from disagg.core.errors import ConfigError
from disagg.machine.findings import Finding, Level, ok

CONNECT_S = 3.0
GREETING_S = 1.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
"""What a DEALER without keys sends in ZMTP 3.0's handshake, after its greeting."""
MAX_ANSWER_NBYTES = 1024


def parse_peer(address: str) -> tuple[str, int]:
    """The host and port of `host:port` or `tcp://host:port`. Raises `ConfigError`."""
    try:
        return parse_address(address if "://" in address else f"tcp://{address}", what="peer")
    except ConfigError as error:
        raise ConfigError(f"peer: expected HOST:PORT, found {address!r}") from error


def peer(host: str, port: int) -> Finding:
    where = f"{bracketed(host)}:{port}"
    started = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            took = time.perf_counter() - started
            return _greeting(connection, where, took)
    except socket.gaierror as error:
        return _unreachable(where, f"the name {host!r} cannot be resolved ({error.strerror})", f"getent hosts {host}")
    except ConnectionRefusedError:
        return _unreachable(
            where,
            f"{where} refuses connections: nothing listens on port {port} there",
            f"on {host}: ss -tlnp 'sport = :{port}'; start its rank with --listen tcp://{where}"
            + ("" if is_loopback(host) else ", not on 127.0.0.1"),
        )
    except TimeoutError:
        return _unreachable(
            where,
            f"{where} does not respond within {CONNECT_S:g} s: a firewall drops the connection, or the host is down",
            f"ping {host}; on {host}: nft list ruleset, and allow the port: iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
        )
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        return _unreachable(where, f"{where} cannot be reached: {error.strerror} ({name})", f"ip route get {host}")


def _unreachable(where: str, cause: str, fix: str) -> Finding:
    return Finding("peer", Level.ERROR, cause, f"no handshake with {where}: requests to that peer time out", fix)


def _greeting(connection: socket.socket, where: str, took_s: float) -> Finding:
    """ZeroMQ's greeting: the server sends ten bytes that begin with FF and end with 7F."""
    connection.settimeout(GREETING_S)
    try:
        found = connection.recv(10)
    except OSError:
        found = b""
    if found[:1] == b"\xff":
        _finish(connection)
        return ok("peer", f"{where} is a control port and responds in {1e3 * took_s:.1f} ms")
    return Finding(
        "peer",
        Level.WARNING,
        f"{where} is open, but sent {found!r}" if found else f"{where} is open, but sent nothing",
        "it is not a control port of this library, so the handshake will fail",
        "ss -tlnp on that host names the process; use the address that the rank prints as address=",
    )


def _finish(connection: socket.socket) -> None:
    """Finish the handshake, or a rank without keys would count and log a refused connection."""
    found, until = b"", time.monotonic() + (connection.gettimeout() or 0.0)
    with contextlib.suppress(OSError):
        connection.sendall(GREETING + READY)
        while b"READY" not in found and len(found) < MAX_ANSWER_NBYTES and time.monotonic() < until:
            part = connection.recv(MAX_ANSWER_NBYTES)
            if not part:
                return
            found += part
