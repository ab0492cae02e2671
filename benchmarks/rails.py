"""Transfers over several network devices of limited rate: how much of their sum arrives, and what a cut rail does.

    sudo .venv/bin/python -m benchmarks.rails [--rails 1 2 4] [--cut SECONDS] [--mtu BYTES ...] [--gbit RATE ...] [--json FILE]

Two network namespaces, joined by veth pairs of 1 Gbit/s each (`tc tbf`), hold one rank each. Engine `nixl` over TCP shares
every transfer over all devices. Pages differ in their axis order, so that pieces have 512 bytes and travel packed. Every byte
is compared. `--gbit 1 0.5` makes rails of different rates, and `--gbit 0` does not limit them, which shows what this machine's
CPU can move. The three commands of `docs/benchmarks/rails.json`:

    --rails 1 2 4 --mtu 9000 1500 --cut 3,   --rails 2 --mtu 9000 --gbit 1 0.5,   --rails 1 --mtu 9000 --gbit 0
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.commands.shell.child import ChildProcess
from disagg.protocol.types import Event
from disagg.state import paged
from harness.conditions import conditions

PAGE, NUM_PAGES, NUM_LAYERS, NUM_KV_HEADS, DIM = 16, 512, 4, 4, 256
"""Of `uint16`: a head of a token has 512 bytes, and all pages together have 128 MiB."""
AXES = {"prefill": "page token kv_head dim", "decode": "page kv_head token dim"}
ADDRESSES = {"prefill": "10.50.{}.1", "decode": "10.50.{}.2"}
OTHER = {"prefill": "decode", "decode": "prefill"}
PATIENCE_S = 120.0
REPEAT = 15


# -- the network -------------------------------------------------------------------------------------------------------


def namespace(role: str) -> str:
    return f"rails{os.getpid()}-{role}"


def interfaces(role: str, num_rails: int) -> list[str]:
    return [f"{role}{rail}" for rail in range(num_rails)]


@contextmanager
def network(rates: Sequence[float], *, mtu: int) -> Iterator[None]:
    """The namespaces, and rails of these rates between them, in Gbit/s; 0: what the CPU can move."""
    try:
        for role in ADDRESSES:
            run(f"ip netns add {namespace(role)}")
            run(f"ip -n {namespace(role)} link set lo up")
        for rail, gbit in enumerate(rates):
            near, far = (f"{role}{rail} netns {namespace(role)}" for role in ADDRESSES)
            run(f"ip link add {near} type veth peer name {far}")
            for role, address in ADDRESSES.items():
                inside = f"ip netns exec {namespace(role)}"
                run(f"{inside} ip address add {address.format(rail)}/24 dev {role}{rail}")
                run(f"{inside} ip link set {role}{rail} mtu {mtu} up")
                if gbit:
                    run(f"{inside} tc qdisc add dev {role}{rail} root tbf rate {gbit * 1e9:.0f}bit burst 128k latency 50ms")
        yield
    finally:
        for role in ADDRESSES:
            subprocess.run(["ip", "netns", "delete", namespace(role)], capture_output=True, check=False)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


# -- a rank ------------------------------------------------------------------------------------------------------------


def content() -> np.ndarray[Any, np.dtype[np.uint16]]:
    """What the request holds: `[layer, K or V, page, token, head, dim]`."""
    shape = (NUM_LAYERS, 2, NUM_PAGES, PAGE, NUM_KV_HEADS, DIM)
    return np.random.default_rng(1).integers(1, 1 << 16, shape, dtype=np.uint16)


def serve(role: str, num_rails: int) -> None:
    """A rank: prints its address, then takes the peer's address, then a request id per line; prints how each one ended."""
    names = AXES[role].split()
    order = tuple(["page", "token", "kv_head", "dim"].index(name) for name in names)
    expected = content().transpose(0, 1, *(2 + axis for axis in order))
    pools = np.ascontiguousarray(expected) if role == "prefill" else np.zeros(expected.shape, np.uint16)
    pairs = {layer: (pools[layer, 0], pools[layer, 1]) for layer in range(NUM_LAYERS)}
    topology = Topology()
    manager = KVManager(
        name=role,
        topology=topology,
        components=[paged.gqa(pairs, axes=AXES[role], num_kv_heads=NUM_KV_HEADS, topology=topology)],
        model=ModelId("rails"),
        backend="nixl",
        require="tcp",
        devices=interfaces(role, num_rails),
        listen=f"tcp://{ADDRESSES[role].format(0)}:0",
        insecure=True,
        trusted_network=True,
    )
    answer(manager.address)
    manager.add_peer(OTHER[role], address=sys.stdin.readline().strip())
    manager.wait_ready(OTHER[role], timeout_s=PATIENCE_S)
    rows = {"kv": Pages(np.arange(NUM_PAGES, dtype=np.int32))}
    answer("ready")
    for line in sys.stdin:
        request = bytes.fromhex(line)
        if role == "decode":
            pools[:] = 0
            answer("ready")
        began, cpu_began = time.monotonic(), time.process_time()
        if role == "decode":
            receiver = manager.receiver(
                request, peer="prefill", rows=rows, need={"kv": (0, NUM_PAGES * PAGE)}, deadline_s=PATIENCE_S
            )
            event: Event = receiver.wait(timeout_s=PATIENCE_S)
        else:
            sender = manager.sender(request, peer="decode", deadline_s=PATIENCE_S)
            sender.send(rows, tokens=(0, NUM_PAGES * PAGE))
            sender.finish()
            event = sender.wait(timeout_s=PATIENCE_S)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
        answer(json.dumps([event.ok, seconds, cpu_s, int((pools != expected).sum())]))
    manager.close()


def answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# -- the measurement ---------------------------------------------------------------------------------------------------


def start(role: str, num_rails: int) -> ChildProcess:
    """A rank's process in its namespace."""
    command = ["ip", "netns", "exec", namespace(role), sys.executable, "-m", "benchmarks.rails"]
    return ChildProcess([*command, "--serve", role, "--rails", str(num_rails)], errors=None)


def measure(rates: Sequence[float], *, cut_s: float | None, mtu: int) -> dict[str, Any]:
    """The fastest of `REPEAT` requests: bytes per second, their share of what the rails may carry, and the CPU time of both
    ranks; then the seconds of a request during which rail 1 is cut, and of the next one.
    """
    with network(rates, mtu=mtu):
        ranks = [start(role, len(rates)) for role in ADDRESSES]
        try:
            addresses = [rank.receive(timeout_s=PATIENCE_S) for rank in ranks]
            for rank, address in zip(ranks, reversed(addresses), strict=True):
                rank.send(address)
            for rank in ranks:
                assert rank.receive(timeout_s=PATIENCE_S) == "ready"
            found = [transfer(ranks) for _ in range(REPEAT)]
            seconds, cpu_s = min(found)
            nbytes = content().nbytes
            result: dict[str, Any] = {
                "rails_gbit": list(rates),
                "mtu": mtu,
                "bytes": nbytes,
                "seconds": seconds,
                "all_seconds": [each for each, _ in found],
                "share_of_sum": 8 * nbytes / seconds / 1e9 / sum(rates) if all(rates) else None,
                "cpu_s": cpu_s,
                "megabytes_by_rail": counters(len(rates)),
            }
            if cut_s is not None and len(rates) > 1:
                result["cut_s"] = cut_s
                result["seconds_with_cut"], _ = transfer(ranks, cut_s=cut_s)
                result["seconds_after_cut"], _ = transfer(ranks)
            return result
        finally:
            for rank in ranks:
                rank.end(timeout_s=PATIENCE_S)


def transfer(ranks: Sequence[ChildProcess], *, cut_s: float | None = None) -> tuple[float, float]:
    """Seconds of one request, and the CPU time of both ranks; rail 1 is down for `cut_s` of them. Every byte must be right."""
    request = new_request_id().hex()
    prefill, decode = ranks
    decode.send(request)
    assert decode.receive(timeout_s=PATIENCE_S) == "ready"
    prefill.send(request)
    if cut_s is not None:
        time.sleep(0.1)
        run(f"ip -n {namespace('decode')} link set decode1 down")
        time.sleep(cut_s)
        run(f"ip -n {namespace('decode')} link set decode1 up")
    answers = [json.loads(rank.receive(timeout_s=PATIENCE_S)) for rank in ranks]
    assert all(ok and wrong == 0 for ok, _, _, wrong in answers), answers
    return float(answers[1][1]), sum(float(cpu_s) for _, _, cpu_s, _ in answers)


def counters(num_rails: int) -> list[float]:
    """Megabytes that each device of the prefill rank has sent."""
    inside = f"ip netns exec {namespace('prefill')} cat"
    paths = [Path(f"/sys/class/net/{name}/statistics/tx_bytes") for name in interfaces("prefill", num_rails)]
    shown = subprocess.run([*inside.split(), *paths], check=True, capture_output=True, text=True).stdout
    return [int(line) / 1e6 for line in shown.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rails", type=int, nargs="+", default=[1, 2, 4], help="numbers of rails, one measurement for each")
    parser.add_argument("--cut", type=float, help="also cut a rail for so many seconds during a request")
    parser.add_argument("--mtu", type=int, nargs="+", default=[1500], help="largest packets, one measurement for each")
    parser.add_argument(
        "--gbit", type=float, nargs="+", default=[1.0], help="rates of the rails, the last one for all others; 0: no limit"
    )
    parser.add_argument("--json", type=Path, help="add the results to this file")
    parser.add_argument("--serve", choices=ADDRESSES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.rails[0])
        return
    about, rows = conditions(), []
    for mtu, num_rails in itertools.product(options.mtu, options.rails):
        rates = [*options.gbit, *num_rails * options.gbit[-1:]][:num_rails]
        rows.append(measure(rates, cut_s=options.cut, mtu=mtu))
        answer(json.dumps(rows[-1]))
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*before, {**about, "rows": rows}], indent=1) + "\n")


if __name__ == "__main__":
    main()
