"""One manager's HTTP server: `/metrics` for Prometheus, `/healthz` and `/readyz` for probes."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app

from disagg.core.address import bracketed
from disagg.core.errors import ConfigError

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
"""For a request to arrive and its answer to leave."""
MAX_CONNECTIONS = 64
"""Beyond this the oldest is closed."""
MAX_REQUEST_NBYTES = 16384
_END = b"\r\n\r\n"


class MetricsServer:
    """`/healthz` answers 200 `ok`, or 503 with what `problem` returns; so does `/readyz` with `unready`. Port 0 is any.
    Raises `ConfigError` if the address cannot be bound.
    """

    def __init__(
        self, registry: CollectorRegistry, problem: Callable[[], str], unready: Callable[[], str], *, host: str, port: int
    ) -> None:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._socket = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS)
        except (OSError, OverflowError, TypeError, ValueError) as error:  # ValueError: a name that IDNA cannot encode
            raise ConfigError(f"metrics: cannot listen at {host!r}, port {port}: {error}") from error
        self.url = f"http://{bracketed(host)}:{self._socket.getsockname()[1]}/metrics"
        self._metrics: Any = make_wsgi_app(registry)
        self._probes = {"/healthz": problem, "/readyz": unready}
        self._connections: dict[asyncio.Task[None], None] = {}
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="disagg-metrics", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            self._socket.close()
            raise

    def close(self) -> None:
        """A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take, sock=self._socket, limit=MAX_REQUEST_NBYTES)
        await self._stop.wait()
        server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]  # not again for the next arrival
            oldest.cancel()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                writer.write(self._answer(await reader.readuntil(_END)))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._connections.pop(task, None)

    def _answer(self, request: bytes) -> bytes:
        first, *rest = request.decode("latin-1").split("\r\n")
        method, target, *_ = [*first.split(" "), ""]
        path, _, query = target.partition("?")
        try:
            if path == "/metrics":
                return self._answer_metrics(method, query, rest)
            if path in self._probes:
                return self._answer_probe(method, self._probes[path]())
        except Exception:
            logger.exception("metrics: %s could not be answered", path)
            return _response("500 Internal Server Error", [], b"")
        return _response("404 Not Found", [], b"this server has /metrics, /healthz and /readyz\n")

    def _answer_probe(self, method: str, problem: str) -> bytes:
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", [("Allow", "GET, HEAD")], b"")
        status = "503 Service Unavailable" if problem else "200 OK"
        response = _response(status, [], f"{problem or 'ok'}\n".encode(errors="replace"))
        return response if method == "GET" else response[: response.index(_END) + len(_END)]

    def _answer_metrics(self, method: str, query: str, rest: list[str]) -> bytes:
        """`prometheus_client` chooses the format and may compress."""
        headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": "/metrics",
            "QUERY_STRING": query,
            "HTTP_ACCEPT": headers.get("accept"),
            "HTTP_ACCEPT_ENCODING": headers.get("accept-encoding"),
        }
        started: list[Any] = []
        body = b"".join(self._metrics(environ, lambda *arguments: started.extend(arguments)))
        return _response(started[0], started[1], body)


def _response(status: str, headers: Sequence[tuple[str, str]], body: bytes) -> bytes:
    fields = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **dict(headers),
    }
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + _END + body
