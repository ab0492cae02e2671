"""The bootstrap server that MooncakeConnector's proxies ask (`/query`). They pass a replica's `engine_id` on to decode, so
it says where decode finds that replica.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from typing import Annotated, Any

import msgspec
import requests

from disagg.core.address import bracketed, is_loopback, is_wildcard, parse_address
from disagg.core.errors import ConfigError
from disagg.integrations.options import Options

logger = logging.getLogger(__name__)

MAX_NBYTES = 1 << 12
MAX_CONNECTIONS = 64
TIMEOUT_S = 5.0
RETRY_S = 0.5


def num_replicas(parallel: Any) -> int:
    """How many replicas answer at this replica's HTTP server. A dense model's replica finds `data_parallel_size` 1. With one
    HTTP server per host it does not learn the number of all replicas.
    """
    if parallel.local_engines_only:
        return int(parallel.data_parallel_size_local)
    return int(parallel.data_parallel_size if parallel.enable_elastic_ep else parallel.elastic_ep_max_dp_size)


class Bootstrap:
    """The names of a server's replicas, by rank. Raises `ConfigError` if it cannot listen."""

    def __init__(self, host: str, port: int, *, max_replicas: int = 1) -> None:
        self._replicas: dict[int, str] = {}
        most = max_replicas

        class Handler(_Handler):
            replicas = self._replicas
            max_replicas = most

        class Server(_Server):
            address_family = AF_INET6 if ":" in host else AF_INET

        try:
            self._server = Server(("" if is_wildcard(host) else host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"bootstrap_port: cannot listen at {host!r}, port {port}: {error}") from error
        threading.Thread(target=self._server.serve_forever, name="disagg-bootstrap", daemon=True).start()

    @classmethod
    def start(cls, parallel: Any, options: Options, name: str) -> Bootstrap | None:
        """Publish a replica's `name`, by a server here if it is the first replica, else by the first one's."""
        assert options.bootstrap_port is not None
        host, _ = parse_address(options.listen, what="listen")
        rank = parallel.data_parallel_index
        if parallel.local_engines_only:  # one HTTP server per host or replica
            rank = parallel.data_parallel_rank_local or 0
        if rank == 0:
            served = cls(host, options.bootstrap_port, max_replicas=parallel.elastic_ep_max_dp_size)
            served.add(rank, name)
            return served
        here = is_loopback(host) or parallel.local_engines_only or is_loopback(parallel.data_parallel_master_ip)
        first = host if here else parallel.data_parallel_master_ip
        url = f"http://{bracketed('127.0.0.1' if is_wildcard(first) else first)}:{options.bootstrap_port}"
        threading.Thread(target=_register, args=(url, rank, name), name="disagg-bootstrap", daemon=True).start()
        return None

    def add(self, rank: int, name: str) -> None:
        self._replicas[rank] = name

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Registration(msgspec.Struct):
    """From another replica, or anybody who reaches the port."""

    dp_rank: Annotated[int, msgspec.Meta(ge=1)]
    engine_id: str


class _Server(ThreadingHTTPServer):
    """At most `MAX_CONNECTIONS` at a time, each for at most about `TIMEOUT_S`."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        self._since: dict[Any, float] = {}
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        open_now = list(self._since)
        for oldest in open_now[: max(0, len(open_now) + 1 - MAX_CONNECTIONS)]:
            self._end(oldest)
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Now and then."""
        for request, since in list(self._since.items()):
            if time.monotonic() - since > TIMEOUT_S:
                self._end(request)

    def _end(self, request: Any) -> None:
        self._since.pop(request, None)
        with contextlib.suppress(OSError):  # it has ended
            request.shutdown(SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    replicas: dict[int, str]
    max_replicas: int
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        if self.path != "/query":
            self.send_error(404)
            return
        found = sorted(self.replicas.items())
        self._answer({str(rank): {"engine_id": name, "worker_addr": {"0": {"0": name}}} for rank, name in found})

    def do_POST(self) -> None:
        """`/register`: another replica's name."""
        if self.path != "/register":
            self.send_error(404)
            return
        try:
            data = self.rfile.read(min(MAX_NBYTES, max(0, int(self.headers["Content-Length"]))))
            given = msgspec.json.decode(data, type=_Registration)
        except (ValueError, TypeError, RecursionError) as error:
            self.send_error(400, f"{type(error).__name__}: {error}")
            return
        if given.dp_rank >= self.max_replicas:
            self.send_error(400, f"dp_rank: expected one of {self.max_replicas} replicas, found {given.dp_rank}")
            return
        self.replicas[given.dp_rank] = given.engine_id
        self._answer({})

    def _answer(self, found: object) -> None:
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing: proxies ask often."""


def _register(url: str, rank: int, name: str) -> None:
    """Repeat until the first replica's server answers."""
    has_failed = False
    while True:
        try:
            requests.post(f"{url}/register", json={"dp_rank": rank, "engine_id": name}, timeout=TIMEOUT_S).raise_for_status()
        except requests.RequestException as error:
            if not has_failed:
                logger.warning("the bootstrap server of the first replica does not answer yet: %s", error)
            has_failed = True
        else:
            return
        time.sleep(RETRY_S)
