"""Peers in etcd: one key for each instance, below a prefix, with a lease that its owner renews. Uses etcd's JSON gateway."""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from disagg.core.errors import DiscoveryError
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.discovery.source import Found

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0
"""How long one endpoint may take to connect and answer, its last byte included."""
MAX_REPLY_NBYTES = 4 << 20
TTL_S = 10
"""How long an announcement outlives its instance."""


# The gateway writes 64-bit numbers as text, and bytes in base64, as `msgspec` does.


class _Entry(msgspec.Struct):
    key: bytes
    value: bytes = b""


class _Range(msgspec.Struct):
    kvs: tuple[_Entry, ...] = ()


class _Lease(msgspec.Struct):
    id: str = msgspec.field(name="ID")
    ttl_s: str = msgspec.field(name="TTL", default="0")


class _Kept(msgspec.Struct):
    result: _Lease


class _Done(msgspec.Struct):
    pass


Reply = TypeVar("Reply")


class _Received(io.RawIOBase):
    """The bytes that a socket receives before `deadline`. Afterwards reading raises `TimeoutError`, also amid a slow reply."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._deadline = deadline

    def makefile(self, _: str) -> io.BufferedReader:
        """Give `http.client.HTTPResponse` a reader, as a socket does."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(remaining_s)
        return self._socket.recv_into(buffer)


def _post(url: str, body: bytes) -> bytes:
    """The body of a reply. Raises `OSError` for another status than 200 or too long a reply, and `HTTPException`."""
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(connect(parts.netloc, timeout=TIMEOUT_S)) as connection:
        connection.connect()  # each address of the host has its time, and the reply
        deadline = time.monotonic() + TIMEOUT_S
        connection.request("POST", parts.path, body)
        reply = http.client.HTTPResponse(_Received(connection.sock, deadline))  # type: ignore[arg-type]  # it calls `makefile` only
        reply.begin()
        if reply.status != 200:
            problem = f"HTTP {reply.status} {reply.reason}"
            with contextlib.suppress(OSError, http.client.HTTPException):
                problem += f": {reply.read(200).decode(errors='replace').strip()}"
            raise OSError(problem)
        content = reply.read(MAX_REPLY_NBYTES + 1)
    if len(content) > MAX_REPLY_NBYTES:
        raise OSError(f"expected a reply of at most {MAX_REPLY_NBYTES} bytes")
    return content


class EtcdClient:
    """Calls of etcd's v3 API at the first endpoint that answers, such as `http://10.0.0.9:2379`."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = list(endpoints)

    def __str__(self) -> str:
        return "etcd at " + ", ".join(self._endpoints)

    def call(self, method: str, kind: type[Reply], **fields: Any) -> Reply:
        """The reply to a request such as `kv/range`. Raises `DiscoveryError` if no endpoint answers."""
        problems = []
        body = msgspec.json.encode(fields)
        for endpoint in tuple(self._endpoints):
            try:
                return msgspec.json.decode(_post(f"{endpoint}/v3/{method}", body), type=kind)
            except (OSError, ValueError, RecursionError, http.client.HTTPException, msgspec.DecodeError) as error:
                problems.append(f"{endpoint}: {type(error).__name__}: {error}")
            self._endpoints.append(self._endpoints.pop(0))
        raise DiscoveryError(f"etcd: {method} failed at {'; '.join(problems)}")


class EtcdPeers:
    """The instances below `prefix`, such as `/disagg/decode/`. Other entries are skipped with a warning."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._warnings = RateLimitedLog(logger, repeat_s=60.0)

    def __str__(self) -> str:
        return f"{self._prefix} of {self._client}"

    def find(self) -> Mapping[str, Found]:
        """The instances now. Raises `DiscoveryError`."""
        first = self._prefix.encode()
        reply = self._client.call("kv/range", _Range, key=first, range_end=first[:-1] + bytes([first[-1] + 1]))
        found = {}
        for entry in reply.kvs:
            name = entry.key.removeprefix(first).decode(errors="replace")
            try:
                found[name] = msgspec.json.decode(entry.value, type=Found)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._warnings.warning("discovery: %s%s in %s is no announcement: %s", self._prefix, name, self._client, error)
        return found


class Announcement:
    """An instance's entry below `prefix`, from the context's begin to its end. A thread renews it, and enters it anew if etcd
    has lost it. It disappears `ttl_s` seconds after a process that was killed.

    A failure to reach etcd is logged, and the thread tries again.
    """

    def __init__(self, client: EtcdClient, prefix: str, *, name: str, instance: Found, ttl_s: int = TTL_S) -> None:
        self._client = client
        self._key = (prefix + name).encode()
        self._value = msgspec.json.encode(instance)
        self._what = f"{prefix}{name}"
        self._ttl_s = ttl_s
        self._lease: str | None = None
        self._stop = threading.Event()
        self._warnings = RateLimitedLog(logger, repeat_s=60.0)
        self._thread = threading.Thread(target=self._run, name="disagg-announcement", daemon=True)

    def __enter__(self) -> Announcement:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        renewed_at = time.monotonic()
        while not self._stop.is_set():
            try:
                self._renew()
                renewed_at = time.monotonic()
            except Exception as error:  # noqa: BLE001 (whatever it is, the next attempt may succeed)
                self._warnings.warning("discovery: cannot announce %s: %s", self._what, error)
                if time.monotonic() > renewed_at + self._ttl_s:
                    self._lease = None
            self._stop.wait(self._ttl_s / 3 if self._lease else 1.0)
        if self._lease is not None:
            try:
                self._client.call("lease/revoke", _Done, ID=self._lease)
            except DiscoveryError as error:
                logger.warning("discovery: %s stays announced for up to %d s: %s", self._what, self._ttl_s, error)

    def _renew(self) -> None:
        """Renew the lease, or take a new one, and enter the instance."""
        if self._lease is not None:
            kept = self._client.call("lease/keepalive", _Kept, ID=self._lease)
            if kept.result.ttl_s == "0":
                self._lease = None
        if self._lease is None:
            self._lease = self._client.call("lease/grant", _Lease, TTL=self._ttl_s).id
            logger.info("discovery: announced %s in %s", self._what, self._client)
        self._client.call("kv/put", _Done, key=self._key, value=self._value, lease=self._lease)
