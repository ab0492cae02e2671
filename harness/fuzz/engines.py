"""Gives a rank damaged endpoints of its engine, inside valid welcomes. Its process is restarted when the engine crashes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from disagg.backends.endpoint import Endpoint
from disagg.protocol.messages import Hello
from harness.fuzz.attacked import HANG_S, AttackedRank, Impostor
from harness.fuzz.damage import damage, damage_bytes
from harness.fuzz.runs import Result
from harness.fuzz.targets import Finding


def damaged_endpoint(rng: random.Random, own: bytes, foreign: Sequence[bytes]) -> bytes:
    """An endpoint whose engine's descriptor is damaged, cut short, or another's; sometimes the envelope is damaged, too."""
    if rng.random() < 0.1:
        return damage(rng, [own, *foreign])
    endpoint = msgspec.msgpack.decode(own, type=Endpoint)
    other = msgspec.msgpack.decode(rng.choice(foreign), type=Endpoint)
    tree = _renamed(rng, msgspec.msgpack.decode(endpoint.descriptor))
    endpoint = msgspec.structs.replace(endpoint, descriptor=msgspec.msgpack.encode(tree))
    match rng.randrange(4):
        case 0:
            descriptor = damage(rng, [endpoint.descriptor])
        case 1:
            descriptor = endpoint.descriptor[: rng.randrange(len(endpoint.descriptor))]
        case 2:
            descriptor = other.descriptor
        case _:
            name = rng.choice([key for key, value in tree.items() if isinstance(value, bytes | str)])
            descriptor = msgspec.msgpack.encode({**tree, name: _damaged_value(rng, tree[name])})
    return msgspec.msgpack.encode(msgspec.structs.replace(endpoint, descriptor=descriptor))


def _renamed(rng: random.Random, tree: dict[str, Any]) -> dict[str, Any]:
    """A descriptor with another name wherever a name is also in its blob: an engine reads the blob of each name once."""
    for name in [value for value in tree.values() if isinstance(value, str)]:
        if any(isinstance(blob, bytes) and name.encode() in blob for blob in tree.values()):
            other = name[:-8] + rng.randbytes(4).hex()
            tree = {key: _replaced(value, name, other) for key, value in tree.items()}
    return tree


def _replaced(value: Any, name: str, other: str) -> Any:
    if isinstance(value, bytes):
        return value.replace(name.encode(), other.encode())
    return other if value == name else value


def _damaged_value(rng: random.Random, value: bytes | str) -> bytes | str:
    """A damaged or shortened blob or string."""
    if isinstance(value, str):
        return damage_bytes(rng, value.encode(), [value.encode()]).decode(errors="replace")
    if rng.random() < 0.3:
        return value[: rng.randrange(len(value) + 1)]
    return damage_bytes(rng, value, [value])


def introduce(inputs: int, *, engine: str, seed: int, crashes_in: Path | None = None) -> Result:
    """Answer a rank's hellos with damaged endpoints. Counts as accepted those to which it connected.

    With `crashes_in` the last endpoints before each crash are written to that folder. Raises `Finding` if a thread of the rank
    dies, or it says no more hellos. Crashes are counted.
    """
    rng, began, context = random.Random(f"{seed}:{engine}"), time.perf_counter(), zmq.Context()
    impostor = Impostor(engine, context)
    foreigners = [Impostor(name, context) for name in (engine, "local")]
    attacked = _Attacked(engine, impostor)
    done = crashes = 0
    try:
        while done < inputs:
            data = damaged_endpoint(rng, impostor.endpoint, [one.endpoint for one in foreigners])
            done += 1
            try:
                attacked.try_endpoint(data)
            except Crash as crash:
                crashes += 1
                _keep(crashes_in, f"{engine}-{crashes}-{crash}".replace(" ", "-"), attacked.last)
                attacked.restart()
        result = attacked.result(done, time.perf_counter() - began, crashes)
    finally:
        attacked.close()
        for one in (impostor, *foreigners):
            one.close()
        context.term()
    return result


class Crash(Exception):
    """The rank's process has ended, by this signal or status."""


class _Attacked:
    """A rank that is given endpoints until it crashes, and its successors. `last` are its newest endpoints."""

    def __init__(self, engine: str, impostor: Impostor) -> None:
        self._engine, self._impostor = engine, impostor
        self._accepted = 0
        self._grown_mib = self._silence_s = 0.0
        self._start()

    def _start(self) -> None:
        self.rank = AttackedRank(self._engine, self._impostor.address)
        self.rank.settle()
        self.last: list[bytes] = []

    def restart(self) -> None:
        """Replace the rank, which has crashed."""
        self._silence_s = max(self._silence_s, self.rank.watcher.longest_s)
        self.rank.close()
        self._start()

    def try_endpoint(self, data: bytes) -> None:
        """Answer the rank's hello with this endpoint, and wait until it has connected or given up. Raises `Crash`."""
        try:
            connection, hello = self._next_hello()
            while self.rank.check()["ready"]:
                self._impostor.forget(connection, hello)
                connection, hello = self._next_hello()
            self.last = [*self.last[-3:], data]
            self._impostor.reply(connection, self._impostor.welcome(hello, data))
            self._next_hello()
            while (state := self.rank.check())["connecting"]:
                time.sleep(0.002)
            self._accepted += state["ready"]
            self._grown_mib = max(self._grown_mib, self.rank.grown_mib)
        except (Finding, OSError) as error:
            if self.rank.crash is None:
                raise
            raise Crash(self.rank.crash) from error

    def _next_hello(self) -> tuple[bytes, Hello]:
        """The rank's next hello, and the name of its connection."""
        until = time.monotonic() + HANG_S
        while self.rank.crash is None and time.monotonic() < until:
            for connection, message in [*self._impostor.received(0.05)][::-1]:
                if isinstance(message, Hello):
                    return connection, message
        raise Finding(f"the rank says no more hellos: {self.rank.crash or self.rank.check()['peer_problem']}")

    def result(self, inputs: int, seconds: float, crashes: int) -> Result:
        silence_ms = max(self._silence_s, self.rank.watcher.silence_s) * 1000
        target = f"endpoint, {self._engine}"
        return Result(target, inputs, self._accepted, seconds, 0.0, self._grown_mib, silence_ms, crashes)

    def close(self) -> None:
        self.rank.close()


def _keep(folder: Path | None, name: str, endpoints: Sequence[bytes]) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for number, endpoint in enumerate(endpoints):
            (folder / f"{name}-{number}.msgpack").write_bytes(endpoint)
