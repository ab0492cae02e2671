"""Soak test of servers: a pair of an inference server under mixed requests, for an hour, to find any process that grows.

Runs in the environment of the engine. Each minute it prints the resident memory, descriptors and threads of every process of
both servers. A run is good if after its tenth minute no process grows by more than 16 MiB, and no answer differs from the first
one to the same prompt. A fifth of the clients leave before their answer is complete::

    python -m harness.soak_servers --engine vllm --minutes 60
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from harness.servers import Server, vllm_pair
from harness.vllm.models import write_model

ENGINES = ("vllm", "sglang")
NUM_CLIENTS = 6
NUM_PROMPTS = 40
LEAVES = 0.2
"""The share of clients that leave after the first token."""
WARM_UP_S, EVERY_S = 600.0, 60.0
MAX_GROWTH_MIB = 16.0
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
"""On the CPU, vLLM compiles each linear layer anew for every number of tokens in a step, 0.6 MiB each. oneDNN keeps 1,024 of
them, which looks like growth for hours. vLLM itself keeps 128 for each layer.
"""


class Sample(NamedTuple):
    """A process at one moment."""

    mib: float
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    """A sample of a process. Raises `OSError` if it has ended."""
    process = Path("/proc") / str(pid)
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Sample(round(resident, 1), len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


def tree(pid: int) -> dict[int, str]:
    """A process and all that it has started, with their names."""
    process = Path("/proc") / str(pid)
    found = {pid: (process / "comm").read_text().strip()}
    for task in (process / "task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                found |= tree(int(child))
    return found


@dataclass
class Clients:
    """What clients ask, and what they got. Prompts come again, so an answer is known after the first time."""

    proxy: Server
    over: threading.Event = field(default_factory=threading.Event)
    answers: dict[int, list[int]] = field(default_factory=dict)
    num_answers: int = 0
    num_left: int = 0
    problems: list[str] = field(default_factory=list)

    def ask(self, seed: int) -> None:
        """Ask until it is over. Runs in a thread of its own."""
        draw = random.Random(seed)
        while not self.over.is_set():
            number = draw.randrange(NUM_PROMPTS)
            prompt = [(7 * i + 13 * number) % 200 + 3 for i in range(10 + 25 * number)]
            try:
                if draw.random() < LEAVES:
                    with self.proxy.ask(prompt, max_tokens=16, stream=True) as answer:
                        answer.readline()
                    self.num_left += 1
                    continue
                found = self.proxy.complete(prompt, max_tokens=4).tokens
            except (OSError, ValueError, urllib.error.HTTPError) as error:
                self.problems.append(f"prompt {number}: {type(error).__name__}: {error}")
                continue
            self.num_answers += 1
            if found != self.answers.setdefault(number, found):
                self.problems.append(f"prompt {number}: expected {self.answers[number]}, found {found}")


@contextlib.contextmanager
def sglang_pair(model: Path) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill and decode with pages of 16 and 32 tokens, and the proxy, all ready."""
    with (
        Server.sglang(model, "--page-size", "16", mode="prefill") as prefill,
        Server.sglang(model, "--page-size", "32", mode="decode") as decode,
        Server.proxy(prefill, decode) as proxy,
    ):
        yield prefill.wait_ready(timeout_s=600), decode.wait_ready(timeout_s=600), proxy.wait_ready()


def watch(servers: dict[str, Server], clients: Clients, minutes: float) -> list[str]:
    """Print a sample each minute. Returns the processes that have grown."""
    begun, base, last = time.monotonic(), dict[str, Sample](), dict[str, Sample]()
    while (passed := time.monotonic() - begun) < 60 * minutes:
        time.sleep(min(EVERY_S, 60 * minutes - passed))
        last = {}
        for name, server in servers.items():
            for pid, program in tree(server.pid).items():
                with contextlib.suppress(OSError):
                    last[f"{name} {program} {pid}"] = sample(pid)
        if time.monotonic() - begun >= min(WARM_UP_S, 60 * minutes / 2):
            base = base or last
        say(f"{(time.monotonic() - begun) / 60:.0f} min: {clients.num_answers} answers, {clients.num_left} clients left")
        for process, now in last.items():
            grown = f", {now.mib - base[process].mib:+.1f} MiB since its tenth minute" if process in base else ""
            say(f"  {process:<32} {now.mib:8.1f} MiB {now.descriptors:5} descriptors {now.threads:4} threads{grown}")
    growth = {process: now.mib - base[process].mib for process, now in last.items() if process in base}
    return [f"{process} has grown by {mib:.1f} MiB" for process, mib in growth.items() if mib > MAX_GROWTH_MIB]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run one pair. Returns 0 if nothing has grown, and every answer was as before."""
    parser = argparse.ArgumentParser(prog="python -m harness.soak_servers", description="Run a pair of servers for long")
    parser.add_argument("--engine", choices=ENGINES, required=True, help="run this in the environment of the engine")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="how long; growth counts from its tenth on")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, metavar="N", help="requests at a time")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the servers first
    os.environ.update(ENVIRONMENT)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        pair = vllm_pair if options.engine == "vllm" else sglang_pair
        prefill, decode, proxy = stack.enter_context(pair(write_model("llama", folder / "llama")))
        clients = Clients(proxy)
        threads = [threading.Thread(target=clients.ask, args=(seed,), daemon=True) for seed in range(options.clients)]
        for thread in threads:
            thread.start()
        grown = watch({"prefill": prefill, "decode": decode}, clients, options.minutes)
        clients.over.set()
        for thread in threads:
            thread.join(120)
    problems = [*grown, *clients.problems[:10]]
    say("\n".join(problems) or f"{clients.num_answers} answers; nothing has grown")
    return int(bool(problems) or not clients.num_answers)


if __name__ == "__main__":
    sys.exit(main())
