"""The attacked rank as its attackers see it: its process, its answers to a peer that only says hello, and an impostor.

Memory is the largest resident size of the process. Silence is the time from a valid hello to its welcome.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from disagg.backends.base import BackendOptions, Transport
from disagg.backends.registry import load
from disagg.commands.shell.child import ChildEnded, ChildProcess
from disagg.core.memory import MemoryRegion
from disagg.layout.agreement import Agreement, encode_placements
from disagg.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    Lend,
    Lending,
    Member,
    Message,
    Reject,
    Renew,
    Welcome,
    decode,
    encode,
)
from harness.fuzz.rank import NOWHERE
from harness.fuzz.runs import Result
from harness.fuzz.samples import MODEL, PEER_SIDE, components, hello_of
from harness.fuzz.targets import Finding

START_S = 60.0
HANG_S = 120.0
WATCH_INTERVAL_S = 0.02
EPOCH = 5


class Impostor:
    """The test as the rank's peer: answers its hellos at `address`, with the endpoint of an engine of its own.

    If it `forgets` the rank, that starts a new connection.
    """

    def __init__(self, engine: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.local, self._own = components(MODEL, PEER_SIDE, 0)
        transport = Transport.AUTO if engine == "local" else Transport.TCP
        self.backend = load(engine, BackendOptions(transport=transport))
        self.regions: list[MemoryRegion] = [region for component in self._own for region in component.regions]
        self.backend.register(self.regions)
        self.endpoint = self.backend.endpoint()
        self.forgets = False
        self.loans: list[int] = []
        """Loans that the rank last listed."""
        self.placements = encode_placements(self._own)
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    def hello(self) -> bytes:
        """The hello of this peer."""
        return hello_of(self.local, "peer", address=self.address, epoch=EPOCH)

    def welcome(self, hello: Hello, endpoint: bytes | None = None) -> Welcome:
        """The answer to the rank's hello."""
        return Welcome(
            version=PROTOCOL_VERSION,
            instance="peer",
            rank=0,
            epoch=EPOCH,
            model="m",
            revision="r",
            table=self.local.table.encode(),
            plans=Agreement.between(self.local, hello.table).digests,
            members=(Member(0, self.address, EPOCH),),
            placements=self.placements,
            backend=self.backend.name,
            endpoint=self.endpoint if endpoint is None else endpoint,
            lending=Lending(4096, 1),
            generation=hello.generation,
        )

    def received(self, timeout_s: float) -> Iterator[tuple[bytes, Message]]:
        """What the rank has sent on its connection, each with the connection's name, after waiting for the first."""
        if not self._router.poll(int(timeout_s * 1000)):
            return
        with suppress(zmq.Again):
            while True:
                connection, *frames = self._router.recv_multipart(zmq.DONTWAIT)
                for frame in frames:
                    message = decode(frame)
                    if isinstance(message, Renew):  # what this answers to a hello changes all the time
                        self.reply(connection, Reject(field="hello", reason="say hello", hello_first=True))
                    else:
                        yield connection, message

    def reply(self, connection: bytes, message: Message) -> None:
        """Answer on the rank's connection."""
        self._router.send_multipart([connection, encode(message)])

    def forget(self, connection: bytes, hello: Hello) -> None:
        """Answer the hello of a rank with other loans than before: the rank gives the connection up and says hello again."""
        welcome = self.welcome(hello)
        assert welcome.lending is not None
        other = msgspec.structs.replace(welcome.lending, first=welcome.lending.first + 1)
        self.reply(connection, msgspec.structs.replace(welcome, lending=other))

    def serve(self, timeout_s: float) -> list[Message]:
        """Answer the rank's hellos. Returns its other messages."""
        others: list[Message] = []
        for connection, message in self.received(timeout_s):
            if isinstance(message, Hello):
                if self.forgets:
                    self.forget(connection, message)
                else:
                    self.reply(connection, self.welcome(message))
                self.forgets = False
            elif isinstance(message, Lend):
                self.loans = [number for number, _ in message.loans]
            else:
                others.append(message)
        return others

    def close(self) -> None:
        self._router.close()
        self.backend.close()


class Watcher:
    """Says hello as the peer `watcher` all the time, in a thread, and measures the longest time until the welcome."""

    def __init__(self, address: str) -> None:
        self.longest_s = 0.0
        self.answered = 0
        self._address = address
        self._stopped = threading.Event()
        self._asked_at = 0.0
        self._thread = threading.Thread(target=self._run, name="fuzz-watcher", daemon=True)
        self._thread.start()

    @property
    def silence_s(self) -> float:
        """The longest silence so far, with the present one."""
        return max(self.longest_s, time.monotonic() - self._asked_at if self._asked_at else 0.0)

    def _run(self) -> None:
        local, _ = components(MODEL, PEER_SIDE, 0)
        hello = hello_of(local, "watcher", address=NOWHERE, epoch=EPOCH)
        context = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._address)
            while not self._stopped.wait(WATCH_INTERVAL_S):
                self._asked_at = time.monotonic()
                dealer.send(hello)
                while not self._stopped.is_set():
                    if dealer.poll(100) and isinstance(decode(dealer.recv_multipart()[0]), Welcome):
                        self.longest_s = max(self.longest_s, time.monotonic() - self._asked_at)
                        self.answered += 1
                        break
                self._asked_at = 0.0
        context.term()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class AttackedRank:
    """The process of the rank. `crash` is how it ended, or `None` while it runs."""

    def __init__(self, engine: str, peer: str) -> None:
        self._process = ChildProcess([sys.executable, "-m", "harness.fuzz.rank", engine, peer])
        self.address = str(self._answer(START_S)["address"])
        self.watcher = Watcher(self.address)
        self._nbytes_before: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def crash(self) -> str | None:
        return self._process.ending

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            return dict(json.loads(self._process.receive(timeout_s=timeout_s)))
        except TimeoutError:
            raise Finding("the attacked rank does not answer: it hangs") from None
        except ChildEnded as error:
            raise Finding(f"the attacked rank does not answer: {error}") from error

    def ask(self, operation: str) -> dict[str, Any]:
        """Send an operation and return the answer. Raises `Finding` if there is none within `HANG_S`."""
        with suppress(ChildEnded):  # `_answer` raises
            self._process.send(json.dumps({"op": operation}))
        return self._answer(HANG_S)

    def check(self) -> dict[str, Any]:
        """The rank's state. Raises `Finding` if a thread of it is dead, or it does not answer hellos any more."""
        state = self.ask("state")
        if not state["ok"]:
            raise Finding(f"the attacked rank: {state['problem']}")
        if self.watcher.silence_s > HANG_S:
            raise Finding(f"the attacked rank has answered no hello for {self.watcher.silence_s:.0f} s")
        return state

    def settle(self) -> None:
        """Count growth from now on."""
        self._nbytes_before = self._max_nbytes()

    @property
    def grown_mib(self) -> float:
        """The growth of the largest resident size since `settle`."""
        assert self._nbytes_before is not None
        return (self._max_nbytes() - self._nbytes_before) / 2**20

    def result(self, target: str, inputs: int, accepted: int, seconds: float, *, slowest_s: float, crashes: int = 0) -> Result:
        """What an attack found, with this process's memory and silence."""
        silence_ms = self.watcher.silence_s * 1000
        return Result(target, inputs, accepted, seconds, slowest_s * 1000, self.grown_mib, silence_ms, crashes)

    def _max_nbytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    def close(self) -> None:
        self.watcher.stop()
        self._process.kill()


@contextmanager
def attack(engine: str) -> Iterator[tuple[AttackedRank, Impostor, zmq.Socket[bytes]]]:
    """A rank, its impostor, and a connection to the rank on which the impostor's hello was accepted."""
    context = zmq.Context()
    impostor = Impostor(engine, context)
    rank = AttackedRank(engine, impostor.address)
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(rank.address)
            dealer.send(impostor.hello())
            await_ready(rank, impostor)
            rank.settle()
            yield rank, impostor, dealer
    finally:
        rank.close()
        impostor.close()
        context.term()


def await_ready(rank: AttackedRank, impostor: Impostor) -> None:
    """Wait until the rank answers the watcher and is connected to the impostor, which a rank with engine `local` never is.

    Raises `Finding` with the reason if that takes longer than `START_S`.
    """
    until = time.monotonic() + START_S
    while not (rank.watcher.answered and (impostor.backend.name == "local" or rank.check()["ready"])):
        impostor.serve(0.05)
        if time.monotonic() > until:
            raise Finding(f"the attacked rank is not ready: {rank.check()['peer_problem']}")


def discard(dealer: zmq.Socket[bytes]) -> None:
    """Read what has arrived."""
    while dealer.poll(0):
        dealer.recv_multipart()
