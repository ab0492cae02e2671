"""Whether a peer's port can be reached, and whether it is a control port."""

from __future__ import annotations

import errno
import socket
import time

from disagg.core.address import bracketed, parse_address
from disagg.machine.findings import Finding, Level, ok

CONNECT_S = 3.0
GREETING_S = 1.0


def peer(address: str) -> Finding:
    host, port = parse_address(address if "://" in address else f"tcp://{address}", what="peer")
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
            f"on {host}: ss -tlnp 'sport = :{port}'; start its rank with --listen tcp://{where}, not on 127.0.0.1",
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
        return ok("peer", f"{where} is a control port and responds in {1e3 * took_s:.1f} ms")
    return Finding(
        "peer",
        Level.WARNING,
        f"{where} is open, but sent {found!r}" if found else f"{where} is open, but sent nothing",
        "it is not a control port of this library, so the handshake will fail",
        "ss -tlnp on that host names the process; use the address that the rank prints as address=",
    )
