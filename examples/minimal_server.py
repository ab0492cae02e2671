"""An inference server in one file, with a toy model: one worker prefills, another decodes.

    python examples/minimal_server.py              two workers on this host, eight requests, every token checked
    python examples/minimal_server.py prefill      one worker; its settings come from DISAGG_* or a TOML file
    python examples/minimal_server.py decode --config decode.toml

Workers read commands and write answers as lines of JSON, so a router can start them anywhere. The toy model's next token
depends on every byte of the KV cache: one wrong byte changes the text.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from disagg import Config, DisaggError, ModelId, Pages, PeerUnreachable, Topology, new_request_id
from disagg.state import paged

LAYERS, HEADS, DIM = 4, 8, 64
CHUNK = 32
"""Tokens of a prefill step. A chunk is transferred while the next one is computed."""
MAX_WAIT_S = 30.0
"""How long a request waits for free pages or for its peer."""
SHAPES = {"prefill": (16, "page token kv_head dim"), "decode": (64, "page kv_head token dim")}
"""Tokens per page and axis order of each role. They may differ."""


# -- a toy model -------------------------------------------------------------------------------------------------------


def key_and_value(tokens: Sequence[int], first: int) -> np.ndarray:
    """The KV of tokens at positions from `first` on: `[k or v, layer, token, head, dim]`."""
    grid = np.indices((2, LAYERS, len(tokens), HEADS, DIM), dtype=np.uint32)
    mixed = grid[0] * 7919 + grid[1] * 104729 + grid[3] * 1299709 + grid[4] * 15485863
    mixed += (np.asarray(tokens, np.uint32) * 2654435761 + np.arange(first, first + len(tokens), dtype=np.uint32) * 40503)[
        None, None, :, None, None
    ]
    kv: np.ndarray = (mixed >> 17).astype(np.float16)
    return kv


def next_token(kv: np.ndarray) -> int:
    """The token that follows the tokens with this KV."""
    return zlib.crc32(np.ascontiguousarray(kv).tobytes()) % 32000


def generate(prompt: Sequence[int], count: int) -> list[int]:
    """The answer of a single worker."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(key_and_value(tokens, 0)))
    return tokens[len(prompt) :]


# -- the KV cache ------------------------------------------------------------------------------------------------------


class Cache:
    """Paged KV in the server's memory, and its free pages."""

    def __init__(self, *, num_pages: int, page_size: int, axes: str) -> None:
        self.page_size, self.axes = page_size, axes
        self._heads_first = axes == "page kv_head token dim"
        page = (HEADS, page_size, DIM) if self._heads_first else (page_size, HEADS, DIM)
        self.tensors = np.zeros((2, LAYERS, num_pages, *page), np.float16)
        self.free = deque(range(num_pages))  # leases return pages from other threads: append and popleft are atomic

    def take(self, num_tokens: int) -> np.ndarray | None:
        """Allocate pages for `num_tokens` tokens; `None` if too few are free."""
        count = -(-num_tokens // self.page_size)
        return np.array([self.free.popleft() for _ in range(count)], np.int32) if count <= len(self.free) else None

    def give_back(self, pages: np.ndarray) -> None:
        self.free.extend(pages.tolist())

    def write(self, pages: np.ndarray, first: int, kv: np.ndarray) -> None:
        """Write the KV of tokens at positions from `first` on to a request's pages."""
        page, offset = np.divmod(np.arange(first, first + kv.shape[2]), self.page_size)
        if self._heads_first:
            self.tensors[:, :, pages[page], :, offset] = kv.transpose(2, 0, 1, 3, 4)
        else:
            self.tensors[:, :, pages[page], offset] = kv

    def read(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        """The KV of a request's first tokens, in the shape of `key_and_value`."""
        found = self.tensors[:, :, pages]
        found = found.transpose(0, 1, 2, 4, 3, 5) if self._heads_first else found
        return found.reshape(2, LAYERS, -1, HEADS, DIM)[:, :, :num_tokens]


# -- one worker --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request as the router sends it to both workers, and its pages on this one."""

    id: bytes
    attempt: int
    peer: str
    prompt: tuple[int, ...]
    output: int
    pages: np.ndarray


class Worker:
    """One rank. `handle` takes commands, `step` carries them out."""

    def __init__(self, config: Config, *, role: str, num_pages: int = 256) -> None:
        page_size, axes = SHAPES[role]
        self.cache = Cache(num_pages=num_pages, page_size=page_size, axes=axes)
        keys, values = self.cache.tensors
        topology = Topology()
        kv = paged.gqa(
            {layer: (keys[layer], values[layer]) for layer in range(LAYERS)}, axes=axes, num_kv_heads=HEADS, topology=topology
        )
        self.manager = config.manager(topology=topology, components=[kv], model=ModelId("toy"))
        self.waiting: deque[dict[str, Any]] = deque()

    def handle(self, command: dict[str, Any]) -> None:
        """Take a command of the router."""
        if command["do"] == "peer":
            self.manager.add_peer(command["name"], address=command["address"], public_key=command.get("public_key"))
        elif command["do"] == "forget":
            self.manager.remove_peer(command["name"])
        else:
            self.waiting.append({**command, "until": time.monotonic() + MAX_WAIT_S})

    def step(self) -> Iterator[dict[str, Any]]:
        """Run one scheduler iteration: start waiting requests, handle ended ones, and yield the answers."""
        for _ in range(len(self.waiting)):
            command = self.waiting.popleft()
            try:
                begun = self._begin(command)
            except PeerUnreachable:  # not connected yet, or lost: wait until it connects
                begun = False
            except DisaggError as error:
                begun = True
                yield {"id": command["id"], "error": str(error)}
            if not begun and time.monotonic() < command["until"]:
                self.waiting.append(command)
            elif not begun:
                yield {"id": command["id"], "error": f"not begun within {MAX_WAIT_S:g} s"}
        for event in self.manager.events():
            request: Request = event.tag
            if event.ok and event.direction == "receive":  # the pages hold the prompt's KV now
                tokens, transport = self._decode(request, json.loads(event.payload)), self.manager.backend.transport
                yield {"id": request.id.hex(), "tokens": tokens, "transport": transport}
            elif not event.ok:
                yield {"id": request.id.hex(), "error": str(event.error)}
            # Also after a failure: pages may be reused only after the lease is released, when no transfer can touch them.
            event.lease.on_release(partial(self.cache.give_back, request.pages))

    def _begin(self, command: dict[str, Any]) -> bool:
        """Start a request; `False` if too few pages are free."""
        prompt, output = tuple(command["prompt"]), command["output"]
        pages = self.cache.take(len(prompt) + (output if command["do"] == "decode" else 0))
        if pages is None:
            return False
        request = Request(bytes.fromhex(command["id"]), command["attempt"], command["peer"], prompt, output, pages)
        try:
            self._receive(request) if command["do"] == "decode" else self._send(request)
        except DisaggError:
            self.cache.give_back(pages)  # the request did not start, so no lease holds the pages
            raise
        return True

    def _receive(self, request: Request) -> None:
        self.manager.receiver(
            request.id,
            attempt=request.attempt,
            peer=request.peer,
            rows={"kv": Pages(request.pages)},
            need={"kv": (0, len(request.prompt))},
            tag=request,
        )

    def _send(self, request: Request) -> None:
        sender = self.manager.sender(request.id, attempt=request.attempt, peer=request.peer, tag=request)
        prompt, pages = request.prompt, Pages(request.pages)
        for start in range(0, len(prompt), CHUNK):
            stop = min(start + CHUNK, len(prompt))
            self.cache.write(request.pages, start, key_and_value(prompt[start:stop], start))
            sender.send({"kv": pages}, tokens=(start, stop))
        first = next_token(self.cache.read(request.pages, len(prompt)))
        sender.finish(payload=json.dumps(first).encode())

    def _decode(self, request: Request, first: int) -> list[int]:
        """Continue from the first token, which the prefill worker computed."""
        tokens = [first]
        while len(tokens) < request.output:
            position = len(request.prompt) + len(tokens) - 1
            self.cache.write(request.pages, position, key_and_value(tokens[-1:], position))
            tokens.append(next_token(self.cache.read(request.pages, position + 1)))
        return tokens


def serve(worker: Worker, config: Config) -> None:
    """Read commands from standard input until it ends, and write answers to standard output."""

    def write(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), flush=True)

    write({"name": config.name, "address": worker.manager.address})
    with worker.manager as manager, selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(manager, selectors.EVENT_READ)  # readable when a request has ended
        rest = b""
        while manager.health().ok:
            for key, _ in selector.select(timeout=0.01 if worker.waiting else 1.0):
                if key.fileobj == 0:
                    data = os.read(0, 1 << 16)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        worker.handle(json.loads(line))
            for answer in worker.step():
                write(answer)
        sys.exit(f"{config.name}: {manager.health().problem}")


# -- the router ----------------------------------------------------------------------------------------------------------


class Remote:
    """The router's end of a worker process. `command` may begin with `ssh` or `ip netns exec`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.command = " ".join(command)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environ})
        self.name = self.address = ""

    def wait_started(self) -> None:
        """Wait until the worker has written its name and address."""
        started = self.answer()
        self.name, self.address = started["name"], started["address"]

    def send(self, **command: Any) -> None:
        """Send a command. Does nothing if the worker died: the request's other worker reports that."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Read the worker's next answer."""
        answer = self.read()
        if answer is None:
            sys.exit(f"{self.name or self.command}: ended with status {self.process.wait()}")
        return answer

    def read(self) -> dict[str, Any] | None:
        """Read the worker's next answer, or `None` once it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{") and line.endswith(b"\n"):  # UCX writes its own lines to standard output
                answer: dict[str, Any] = json.loads(line)
                return answer
        return None

    def close_input(self) -> None:
        """Close the worker's input, which ends it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        """Close the worker's input, and wait until it has ended."""
        assert self.process.stdout is not None
        self.close_input()
        self.process.wait(60)
        self.process.stdout.close()


@contextmanager
def started(role: str, *arguments: str, environ: Mapping[str, str] | None = None, on: Sequence[str] = ()) -> Iterator[Remote]:
    """Start a worker that ends with the `with` block. `on` is the beginning of its command."""
    remote = Remote([*on, sys.executable, __file__, role, *arguments], environ or {})
    try:
        yield remote
    finally:
        remote.close()


def introduce(one: Remote, other: Remote) -> None:
    """Send each of two workers the address of the other."""
    one.send(do="peer", name=other.name, address=other.address)
    other.send(do="peer", name=one.name, address=one.address)


def compare(prefill: Remote, decode: Remote, *, num_requests: int = 8) -> str:
    """Serve requests with two workers, compare every answer with that of a single worker, and return a summary."""
    expected, transports = {}, set()
    for number in range(num_requests):
        prompt = [(number * 31 + i * 17) % 32000 for i in range(20 + 40 * number)]
        request = {"id": new_request_id().hex(), "attempt": 0, "prompt": prompt, "output": 6}
        expected[request["id"]] = generate(prompt, 6)
        prefill.send(do="prefill", peer=decode.name, **request)
        decode.send(do="decode", peer=prefill.name, **request)
    for _ in expected:
        answer = decode.answer()
        if answer.get("tokens") != expected[answer["id"]]:
            sys.exit(f"wrong answer: {answer}")
        transports.add(answer["transport"])
    return f"{num_requests} requests, every token as expected, over {', '.join(sorted(transports))}"


def demo(backend: str) -> None:
    """Run two workers on this host."""
    begun = time.monotonic()
    with ExitStack() as opened:
        workers = []
        for role in ("prefill", "decode"):
            environ = {"DISAGG_NAME": f"{role}-0", "DISAGG_BACKEND": backend}
            workers.append(opened.enter_context(started(role, environ=environ)))
        for worker in workers:
            worker.wait_started()
        introduce(*workers)
        print(f"{compare(*workers)}, {time.monotonic() - begun:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=sorted(SHAPES))
    parser.add_argument("--config", type=Path, help="TOML file with the worker's settings")
    parser.add_argument("--backend", default="auto", help="engine of both workers; used without a role")
    given = parser.parse_args()
    if given.role is None:
        demo(given.backend)
        return
    config = Config.load(file=given.config, environ=os.environ)
    serve(Worker(config, role=given.role), config)


if __name__ == "__main__":
    main()
