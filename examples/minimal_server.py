"""A whole inference server in one file, but for the model: prefill on one worker, decode on another.

    python examples/minimal_server.py              two workers on this host, eight requests, every token checked
    python examples/minimal_server.py prefill      one worker; its settings come from DISAGG_* or a TOML file
    python examples/minimal_server.py decode --config decode.toml

A worker takes requests as lines of JSON and answers in lines of JSON, so that a router can start it anywhere. Its model is
a stand-in whose next token depends on every byte of the KV cache: one wrong byte, and the text is another.
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
from pathlib import Path
from typing import Any

import numpy as np

from disagg import Config, DisaggError, ModelId, Pages, PeerUnreachable, Topology, new_request_id
from disagg.state import paged

LAYERS, HEADS, DIM = 4, 8, 64
CHUNK = 32
"""Tokens of a prefill step: what is computed is on its way while the next chunk is computed."""
PATIENCE_S = 30.0
"""How long a request waits for free pages, or for its peer."""
SHAPES = {"prefill": (16, "page token kv_head dim"), "decode": (64, "page kv_head token dim")}
"""Tokens per page and order of a page: the two roles need not agree."""


# -- the model: a stand-in ---------------------------------------------------------------------------------------------


def key_and_value(tokens: Sequence[int], first: int) -> np.ndarray:
    """KV of tokens at positions from `first` on: `[k or v, layer, token, head, dim]`."""
    grid = np.indices((2, LAYERS, len(tokens), HEADS, DIM), dtype=np.uint32)
    mixed = grid[0] * 7919 + grid[1] * 104729 + grid[3] * 1299709 + grid[4] * 15485863
    mixed += (np.asarray(tokens, np.uint32) * 2654435761 + np.arange(first, first + len(tokens), dtype=np.uint32) * 40503)[
        None, None, :, None, None
    ]
    kv: np.ndarray = (mixed >> 17).astype(np.float16)
    return kv


def next_token(kv: np.ndarray) -> int:
    """The token that follows those whose KV this is."""
    return zlib.crc32(np.ascontiguousarray(kv).tobytes()) % 32000


def generate(prompt: Sequence[int], count: int) -> list[int]:
    """What a single worker would answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(key_and_value(tokens, 0)))
    return tokens[len(prompt) :]


# -- the KV cache ------------------------------------------------------------------------------------------------------


class Cache:
    """Paged KV in memory that the server owns, and which of its pages are free."""

    def __init__(self, *, num_pages: int, page_size: int, axes: str) -> None:
        self.page_size, self.axes = page_size, axes
        self._heads_first = axes == "page kv_head token dim"
        page = (HEADS, page_size, DIM) if self._heads_first else (page_size, HEADS, DIM)
        self.tensors = np.zeros((2, LAYERS, num_pages, *page), np.float16)
        self.free = deque(range(num_pages))  # append and popleft are atomic: leases give pages back from other threads

    def take(self, num_tokens: int) -> np.ndarray | None:
        """Pages for so many tokens; `None` where there are not enough now."""
        count = -(-num_tokens // self.page_size)
        return np.array([self.free.popleft() for _ in range(count)], np.int32) if count <= len(self.free) else None

    def give_back(self, pages: np.ndarray) -> None:
        self.free.extend(pages.tolist())

    def write(self, pages: np.ndarray, first: int, kv: np.ndarray) -> None:
        """Put KV of tokens at positions from `first` on into a request's pages."""
        page, offset = np.divmod(np.arange(first, first + kv.shape[2]), self.page_size)
        if self._heads_first:
            self.tensors[:, :, pages[page], :, offset] = kv.transpose(2, 0, 1, 3, 4)
        else:
            self.tensors[:, :, pages[page], offset] = kv

    def read(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        """KV of a request's first tokens, as `key_and_value` gives it."""
        found = self.tensors[:, :, pages]
        found = found.transpose(0, 1, 2, 4, 3, 5) if self._heads_first else found
        return found.reshape(2, LAYERS, -1, HEADS, DIM)[:, :, :num_tokens]


# -- one worker --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request as the router gives it to both workers, and the pages that it has here."""

    id: bytes
    attempt: int
    peer: str
    prompt: tuple[int, ...]
    output: int
    pages: np.ndarray


class Worker:
    """One rank. It is told what to do with `handle`, and does what is due with `step`."""

    def __init__(self, config: Config, *, role: str, num_pages: int = 256) -> None:
        page_size, axes = SHAPES[role]
        self.cache = Cache(num_pages=num_pages, page_size=page_size, axes=axes)
        keys, values = self.cache.tensors
        topology = Topology()
        kv = paged.gqa(
            {layer: (keys[layer], values[layer]) for layer in range(LAYERS)}, axes=axes, num_kv_heads=HEADS, topology=topology
        )
        self.manager = config.manager(topology=topology, components=[kv], model=ModelId("stand-in"))
        self.waiting: deque[dict[str, Any]] = deque()

    def handle(self, order: dict[str, Any]) -> None:
        """Take an order of the router."""
        if order["do"] == "peer":
            self.manager.add_peer(order["name"], address=order["address"], public_key=order.get("public_key"))
        else:
            self.waiting.append({**order, "until": time.monotonic() + PATIENCE_S})

    def step(self) -> Iterator[dict[str, Any]]:
        """One turn of the scheduler: begin what can begin, end what has ended; gives the answers."""
        for _ in range(len(self.waiting)):
            order = self.waiting.popleft()
            try:
                begun = self._begin(order)
            except PeerUnreachable:  # not yet there, or not there any more: the router may say otherwise later
                begun = False
            except DisaggError as error:
                begun = True
                yield {"id": order["id"], "error": str(error)}
            if not begun and time.monotonic() < order["until"]:
                self.waiting.append(order)
            elif not begun:
                yield {"id": order["id"], "error": f"not begun within {PATIENCE_S:g} s"}
        for event in self.manager.events():
            request: Request = event.tag
            if event.ok and event.direction == "receive":  # the pages hold the prompt's KV now
                tokens, transport = self._decode(request, json.loads(event.payload)), self.manager.backend.transport
                yield {"id": request.id.hex(), "tokens": tokens, "transport": transport}
            elif not event.ok:
                yield {"id": request.id.hex(), "error": str(event.error)}
            # Also after a failure: pages may be used again once nobody can touch them any more, and not before.
            event.lease.on_release(lambda pages=request.pages: self.cache.give_back(pages))  # type: ignore[misc]

    def _begin(self, order: dict[str, Any]) -> bool:
        """Begin a request; `False` where there are no pages for it now."""
        prompt, output = tuple(order["prompt"]), order["output"]
        pages = self.cache.take(len(prompt) + (output if order["do"] == "decode" else 0))
        if pages is None:
            return False
        request = Request(bytes.fromhex(order["id"]), order["attempt"], order["peer"], prompt, output, pages)
        try:
            self._receive(request) if order["do"] == "decode" else self._send(request)
        except DisaggError:
            self.cache.give_back(pages)  # nothing was begun, so nothing has a lease on them
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
        prompt = request.prompt
        for start in range(0, len(prompt), CHUNK):
            stop = min(start + CHUNK, len(prompt))
            self.cache.write(request.pages, start, key_and_value(prompt[start:stop], start))
            sender.send({"kv": Pages(request.pages)}, tokens=(start, stop))
        first = next_token(self.cache.read(request.pages, len(prompt)))
        sender.finish(payload=json.dumps(first).encode())

    def _decode(self, request: Request, first: int) -> list[int]:
        """Go on from the first token, which the prefill worker has computed."""
        tokens = [first]
        while len(tokens) < request.output:
            position = len(request.prompt) + len(tokens) - 1
            self.cache.write(request.pages, position, key_and_value(tokens[-1:], position))
            tokens.append(next_token(self.cache.read(request.pages, position + 1)))
        return tokens


def serve(worker: Worker, name: str) -> None:
    """Take orders from standard input until it ends; answers go to standard output."""

    def say(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), flush=True)

    say({"name": name, "address": worker.manager.address})
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
                say(answer)
        sys.exit(f"{name}: {manager.health().problem}")


# -- the router: what a deployment has in front of its workers ---------------------------------------------------------


class Remote:
    """A worker in a process of its own, as the router has it. `command` may begin with ssh, or with ip netns exec."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.command = " ".join(command)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environ})
        self.name = self.address = ""

    def wait_started(self) -> None:
        """Wait until it has said who it is, and where."""
        told = self.answer()
        self.name, self.address = told["name"], told["address"]

    def tell(self, **order: Any) -> None:
        """Give it an order. One that has died does not hear it: the other worker of that request says so."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name or self.command}: ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Have it end, and wait until it has."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@contextmanager
def started(role: str, *arguments: str, environ: Mapping[str, str] | None = None, on: Sequence[str] = ()) -> Iterator[Remote]:
    """A worker that ends with the block; `on` is what its command begins with."""
    remote = Remote([*on, sys.executable, __file__, role, *arguments], environ or {})
    try:
        yield remote
    finally:
        remote.close()


def introduce(one: Remote, other: Remote) -> None:
    """Tell two workers of each other."""
    one.tell(do="peer", name=other.name, address=other.address)
    other.tell(do="peer", name=one.name, address=one.address)


def compare(prefill: Remote, decode: Remote, *, num_requests: int = 8) -> str:
    """Have two workers serve requests, compare every answer with what one worker alone would say; how it went, in words."""
    expected, transports = {}, set()
    for number in range(num_requests):
        prompt = [(number * 31 + i * 17) % 32000 for i in range(20 + 40 * number)]
        request = {"id": new_request_id().hex(), "attempt": 0, "prompt": prompt, "output": 6}
        expected[request["id"]] = generate(prompt, 6)
        prefill.tell(do="prefill", peer=decode.name, **request)
        decode.tell(do="decode", peer=prefill.name, **request)
    for _ in expected:
        answer = decode.answer()
        if answer.get("tokens") != expected[answer["id"]]:
            sys.exit(f"wrong answer: {answer}")
        transports.add(answer["transport"])
    return f"{num_requests} requests, every token as expected, over {', '.join(sorted(transports))}"


def demo(backend: str) -> None:
    """Two workers on this host."""
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
    parser.add_argument("--backend", default="auto", help="of both workers, without a role")
    given = parser.parse_args()
    if given.role is None:
        demo(given.backend)
        return
    config = Config.load(file=given.config, environ=os.environ)
    serve(Worker(config, role=given.role), config.name)


if __name__ == "__main__":
    main()
