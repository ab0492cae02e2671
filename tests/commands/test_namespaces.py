"""Prefill and decode in separate network namespaces: as on two hosts, over TCP only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands.conftest import BYTES_PER_TOKEN

TOKENS = 70
PORT, DRIVER_PORT = 7100, 7200
PREFILL, DECODE = "10.211.77.1", "10.211.77.2"
EXPOSED = ("--insecure", "--trusted-network")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Hosts:
    """Two connected namespaces, by their addresses."""

    names: dict[str, str]

    def command(self, address: str, module: str, *arguments: str) -> list[str]:
        """Run a command on the host with this address."""
        return ["ip", "netns", "exec", self.names[address], sys.executable, "-m", module, *arguments]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command 'ip' (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = {PREFILL: f"disagg-{os.getpid()}-p", DECODE: f"disagg-{os.getpid()}-d"}
    ends = {PREFILL: f"dp{os.getpid()}", DECODE: f"dd{os.getpid()}"}
    with contextlib.ExitStack() as opened:
        try:
            for name in names.values():
                ip("netns", "add", name)
                opened.callback(ip, "netns", "del", name)
            ip("link", "add", ends[PREFILL], "type", "veth", "peer", "name", ends[DECODE])
            for address, name in names.items():
                ip("link", "set", ends[address], "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", ends[address])
                ip("-n", name, "link", "set", ends[address], "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield Hosts(names)


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[None]:
    """A running rank, which must end with status 0."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert "address=tcp://" in process.stdout.readline()
            yield
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_every_byte_crosses(hosts: Hosts, engine: str, model: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    same = ("--model", model, "--backend", engine, "--transport", "tcp", "--pages", "16", *EXPOSED)
    leader = f"tcp://{PREFILL}:{PORT}"
    ranks = [
        (PREFILL, 0, ("prefill", "--side", "tp=2")),
        (PREFILL, 1, ("prefill", "--side", "tp=2", "--rank", "1", "--leader", leader)),
        (DECODE, 0, ("decode", "--side", "tp=1,page=64")),
    ]
    drivers = []
    with contextlib.ExitStack() as opened:
        for host, offset, arguments in ranks:
            drivers.append(f"tcp://{host}:{DRIVER_PORT + offset}")
            where = ("--listen", f"tcp://{host}:{PORT + offset}", "--driver", drivers[-1])
            opened.enter_context(started(hosts.command(host, "disagg.commands", *arguments, *same, *where)))
        case = ("--model", model, "--backend", engine, "--tokens", str(TOKENS), "--prefill", "tp=2", "--decode", "tp=1,page=64")
        how = ("--repeat", "2", "--no-ceiling", "--requests", "2", "--timeout", "30", "--json", str(rows))
        connect = [argument for driver in drivers for argument in ("--connect", driver)]
        command = hosts.command(PREFILL, "disagg.commands.bench", *case, *how, *connect)
        ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(rows.read_text())
    assert row["verified"] is True
    assert row["transport"] == "tcp"
    assert row["bytes"] == 2 * TOKENS * BYTES_PER_TOKEN


def test_off_loopback_both_planes_must_be_allowed(hosts: Hosts, mooncake: str, model: str) -> None:
    listen = ("prefill", "--model", model, "--backend", mooncake, "--listen", f"tcp://{PREFILL}:{PORT}")
    for given, named in (((), "keys"), (EXPOSED[:1], "trusted_network")):
        command = hosts.command(PREFILL, "disagg.commands", *listen, *given)
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert ended.returncode in (1, 2)
        assert named in ended.stderr
        assert "Traceback" not in ended.stderr
