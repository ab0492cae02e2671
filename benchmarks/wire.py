"""Transfers limited by the wire: prefill and decode in two network namespaces, joined by a link of a given rate.

    python -m benchmarks.wire --backend nixl --backend mooncake --json rows.json

Creates the namespaces, a pair of virtual Ethernet devices, and a token bucket of `--rate` at both ends. Starts the ranks in
their namespaces with `disagg prefill` and `disagg decode`, drives them with `disagg-bench`, and collects its rows. Needs root,
`ip` and `tc` (iproute2). Removes everything that it created.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from disagg.commands.cases.sides import Side
from disagg.commands.shell.child import ChildEnded, ChildProcess

ADDRESSES = {"prefill": "10.211.78.1", "decode": "10.211.78.2"}
PORT, DRIVER_PORT = 7300, 7400
BURST = "256kb"
LATENCY = "20ms"
START_S = 60.0


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def link(rate: str, congestion: str | None) -> Iterator[dict[str, str]]:
    """Create two namespaces with a link of `rate` in both directions; yields their names by role."""
    names = {role: f"disagg-wire-{os.getpid()}-{role}" for role in ADDRESSES}
    devices = {role: f"dw{os.getpid() % 100_000}{role[0]}" for role in ADDRESSES}
    with contextlib.ExitStack() as opened:
        for name in names.values():
            run("ip", "netns", "add", name)
            opened.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", devices["prefill"], "type", "veth", "peer", "name", devices["decode"])
        for role, name in names.items():
            device = devices[role]
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{ADDRESSES[role]}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
            run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *shape)
            if congestion:
                run("ip", "netns", "exec", name, "sysctl", f"net.ipv4.tcp_congestion_control={congestion}")
        yield names


@contextlib.contextmanager
def rank(namespace: str, *arguments: str) -> Iterator[None]:
    """Start a rank; it ends at the end of the context."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "disagg.commands", *arguments, "--until-stdin-ends"]
    with ChildProcess(command) as child:
        try:
            started = "address=" in child.receive(timeout_s=START_S)
        except (ChildEnded, TimeoutError):
            started = False
        if not started:
            raise click.ClickException(f"a rank did not start: {' '.join(command)}")
        yield


def measure(names: dict[str, str], case: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure one case; returns its rows."""
    sides = {"prefill": case["prefill"], "decode": case["decode"]}
    same = ["--model", case["model"], "--backend", case["backend"], "--transport", "tcp", "--pages", str(case["pages"])]
    same += ["--layers", str(case["layers"])] if case["layers"] else []
    drivers = []
    with contextlib.ExitStack() as opened:
        for role, side in sides.items():
            for number in range(Side.parse(side).num_ranks):
                host = ADDRESSES[role]
                drivers.append(f"tcp://{host}:{DRIVER_PORT + number}")
                where = ["--listen", f"tcp://{host}:{PORT + number}", "--driver", drivers[-1], "--rank", str(number)]
                where += ["--leader", f"tcp://{host}:{PORT}"] if number else []
                exposed = ["--insecure", "--trusted-network"]
                opened.enter_context(rank(names[role], role, "--side", side, *same, *where, *exposed))
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.json"
            command = ["ip", "netns", "exec", names["prefill"], sys.executable, "-m", "disagg.commands.bench"]
            command += ["--backend", case["backend"], "--model", case["model"], "--tokens", str(case["tokens"])]
            command += ["--prefill", case["prefill"], "--decode", case["decode"], "--repeat", str(case["repeat"])]
            command += ["--layers", str(case["layers"])] if case["layers"] else []
            command += [argument for driver in drivers for argument in ("--connect", driver)]
            subprocess.run([*command, "--json", str(rows)], check=True)
            found: list[dict[str, Any]] = json.loads(rows.read_text())
    return found


@click.command(context_settings={"show_default": True})
@click.option("--backend", "backends", multiple=True, default=("nixl", "mooncake"), help="Engine; repeat for several.")
@click.option("--model", "models", multiple=True, default=("llama-3-8b",), help="Model; repeat for several.")
@click.option("--layers", type=click.IntRange(1), default=4, help="Keep only the first layers of each model.")
@click.option("--tokens", type=click.IntRange(1), default=4096, help="Tokens of the request.")
@click.option("--pages", type=click.IntRange(1), default=300, help="Pages per pool.")
@click.option("--pair", "pairs", multiple=True, nargs=2, default=(("tp=2", "tp=1"),), help="Prefill and decode side.")
@click.option("--rate", default="2gbit", help="Rate of the link, in tc's notation.")
@click.option("--congestion", help="TCP congestion control; default: the host's.")
@click.option("--repeat", type=click.IntRange(1), default=10, help="Runs per case.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this file.")
def main(
    *,
    backends: tuple[str, ...],
    models: tuple[str, ...],
    pairs: tuple[tuple[str, str], ...],
    rate: str,
    congestion: str | None,
    json_file: Path | None,
    **settings: int,
) -> None:
    """Measure every engine with every model and pair of sides over a link of a given rate."""
    rows: list[dict[str, Any]] = []
    with link(rate, congestion) as names:
        for backend in backends:
            for model in models:
                for prefill, decode in pairs:
                    case = {"backend": backend, "model": model, "prefill": prefill, "decode": decode, **settings}
                    rows += [{**row, "link": rate, "congestion": congestion} for row in measure(names, case)]
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
