"""Servers that peers are found in: etcd, and a DNS server. Both come from Debian's packages and run on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.debian import fetched
from harness.ports import free_ports

START_S = 30.0


class Etcd:
    """One etcd server. `address` is `host:port`; it stays the same when the server is stopped and started again."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(2)
        self.address = f"127.0.0.1:{ports[0]}"
        peer = f"http://127.0.0.1:{ports[1]}"
        self._url = f"http://{self.address}"
        self._log = folder / "etcd.log"
        self._command = [
            str(fetched("etcd", ("etcd-server",)) / "root/usr/bin/etcd"),
            f"--data-dir={folder / 'data'}",
            f"--listen-client-urls={self._url}",
            f"--advertise-client-urls={self._url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it serves."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        _wait(self._process, lambda: _answers(f"{self._url}/health"), self._log)

    def stop(self) -> None:
        """Kill the server."""
        if self._process is not None:
            _kill(self._process)
            self._process = None


@contextmanager
def etcd_server() -> Iterator[Etcd]:
    """An etcd server with no keys. Raises `FetchError` where its package cannot be had."""
    with tempfile.TemporaryDirectory(prefix="disagg-etcd-") as folder:
        server = Etcd(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()


class DnsServer:
    """A DNS server at `port` of 127.0.0.1."""

    def __init__(self, folder: Path, services: Collection[Sequence[str | int]]) -> None:
        (self.port,) = free_ports(1, socket.SOCK_DGRAM)
        self._hosts, self._log = folder / "hosts", folder / "dnsmasq.log"
        self._hosts.touch()
        root = fetched("dnsmasq", ("dnsmasq-base",)) / "root"
        libraries = ":".join(str(path) for path in (root / "usr/lib").glob("*-linux-gnu"))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(root / "usr/sbin/dnsmasq"),
                    "--conf-file=/dev/null",
                    "--keep-in-foreground",
                    "--log-facility=-",
                    f"--user={os.environ.get('USER') or 'root'}",
                    "--pid-file=",
                    f"--port={self.port}",
                    "--listen-address=127.0.0.1",
                    "--bind-interfaces",
                    "--no-resolv",
                    "--no-hosts",
                    "--local=/test/",
                    f"--addn-hosts={self._hosts}",
                    *(f"--srv-host={','.join(map(str, service))}" for service in services),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "LD_LIBRARY_PATH": libraries},
            )
        _wait(self._process, lambda: b"read" in self._log.read_bytes(), self._log)

    def set_addresses(self, names: Mapping[str, Sequence[str]]) -> None:
        """Replace all addresses by those of `names`."""
        self._hosts.write_text("".join(f"{address} {name}\n" for name, found in names.items() for address in found))
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Kill the server."""
        _kill(self._process)


@contextmanager
def dns_server(services: Collection[Sequence[str | int]] = ()) -> Iterator[DnsServer]:
    """A DNS server for the domain `test`, with SRV records `(name, target, port, priority, weight)`, the last two optional.

    Raises `FetchError` where its package cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="disagg-dns-") as folder:
        server = DnsServer(Path(folder), services)
        try:
            yield server
        finally:
            server.stop()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > until:
            _kill(process)
            raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
