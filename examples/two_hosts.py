"""Two hosts with keys and configuration files: `python examples/two_hosts.py` (as root).

Two network namespaces on this machine act as the hosts: each has its own network stack, and a link connects them. Real hosts
use the same files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from examples.minimal_server import compare, started  # noqa: E402

HOSTS = {"prefill": "10.211.78.1", "decode": "10.211.78.2"}
CONFIG = """
name = "{role}-0"
listen = "tcp://{address}:7000"
backend = "{backend}"
transport = "tcp"
keys = "{folder}/{role}.toml"
trusted_network = true

[peers]
{peer}-0 = "tcp://{peer_address}:7000"

[peer_keys]
{peer}-0 = "{peer_key}"
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def hosts() -> Iterator[dict[str, list[str]]]:
    """Create two connected namespaces. Yields the beginning of a command that runs in each."""
    names = {role: f"disagg-{os.getpid()}-{role}" for role in HOSTS}
    ends = {role: f"{role[:2]}{os.getpid()}" for role in HOSTS}
    with ExitStack() as opened:
        for name in names.values():
            ip("netns", "add", name)
            opened.callback(ip, "netns", "del", name)
        ip("link", "add", ends["prefill"], "type", "veth", "peer", "name", ends["decode"])
        for role, name in names.items():
            ip("link", "set", ends[role], "netns", name)
            ip("-n", name, "addr", "add", f"{HOSTS[role]}/24", "dev", ends[role])
            ip("-n", name, "link", "set", ends[role], "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield {role: ["ip", "netns", "exec", name] for role, name in names.items()}


def write_configs(folder: Path, backend: str) -> None:
    """Write a key pair and a configuration file for each host."""
    public = {
        role: subprocess.run(
            [sys.executable, "-m", "disagg.commands", "keygen", "--out", str(folder), "--name", role],
            check=True, capture_output=True, text=True,
        ).stdout.strip()
        for role in HOSTS
    }  # fmt: skip
    for role, peer in (("prefill", "decode"), ("decode", "prefill")):
        text = CONFIG.format(
            role=role, address=HOSTS[role], backend=backend, folder=folder, peer=peer, peer_address=HOSTS[peer],
            peer_key=public[peer],
        )  # fmt: skip
        (folder / f"{role}.config.toml").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("backend", nargs="?", default="auto", help="auto, nixl or mooncake (auto)")
    backend = parser.parse_args().backend
    with tempfile.TemporaryDirectory() as folder, hosts() as on, ExitStack() as opened:
        write_configs(Path(folder), backend)
        workers = [
            opened.enter_context(started(role, "--config", f"{folder}/{role}.config.toml", on=on[role])) for role in HOSTS
        ]
        for worker in workers:
            worker.wait_started()
            print(f"{worker.name} at {worker.address}")
        print(compare(*workers))


if __name__ == "__main__":
    main()
