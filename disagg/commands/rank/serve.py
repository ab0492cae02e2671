"""Runs a rank until it is stopped. With a driver address, it also accepts a benchmark's commands."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import singledispatchmethod

import msgspec
import zmq

from disagg.commands.cases.instructions import (
    AnyCommand,
    AnyReply,
    Check,
    Clear,
    Collect,
    Copied,
    Cpu,
    Describe,
    Difference,
    Done,
    Exit,
    Failed,
    Fault,
    Fill,
    HealthReport,
    Listen,
    Listening,
    Memcpy,
    Move,
    MoveRaw,
    Peer,
    ReadCpu,
    ReadHealth,
    Start,
    WaitReady,
)
from disagg.commands.rank.moves import move, move_raw
from disagg.commands.rank.rank import RankConfig, ResidentRank
from disagg.commands.rank.raw import Sink, memcpy_gbps
from disagg.commands.rank.requests import Requests
from disagg.commands.shell.logs import Format, json_line
from disagg.commands.shell.text import counted
from disagg.core.address import bracketed, parse_address
from disagg.core.errors import ConfigError, DisaggError, LocalProtocolError

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""How often a rank checks whether it must end, and its peers' state."""


class Exiting(Exception):
    """A driver ended the rank."""


class Commands:
    """A driver's commands on one rank, one at a time; a run continues in its own thread."""

    def __init__(self, resident: ResidentRank) -> None:
        self._resident = resident
        self._requests: Requests | None = None

    def answer(self, data: bytes) -> bytes:
        """An error is a reply too. Raises `Exiting` for `Exit`."""
        try:
            reply = self.run(_DECODER.decode(data))
        except (DisaggError, msgspec.DecodeError, UnicodeDecodeError, TimeoutError) as error:
            reply = Failed(str(error))
        except Exiting:
            raise
        except Exception as error:  # a failed command must not end the rank
            logger.exception("a command failed")
            reply = Failed(f"{type(error).__name__}: {error}")
        return msgspec.msgpack.encode(reply)

    @singledispatchmethod
    def run(self, command: AnyCommand) -> AnyReply:
        raise LocalProtocolError(f"unknown command {type(command).__name__}")

    @run.register
    def _(self, _: Describe) -> AnyReply:
        return self._resident.describe()

    @run.register
    def _(self, command: Peer) -> AnyReply:
        key = self._resident.config.public_keys().get(command.name)
        self._resident.manager.add_peer(command.name, address=command.address, public_key=key)
        return Done()

    @run.register
    def _(self, command: WaitReady) -> AnyReply:
        self._resident.manager.wait_ready(command.name, timeout_s=command.timeout_s)
        return Done()

    @run.register
    def _(self, command: Fill) -> AnyReply:
        self._resident.content.fill(command.items)
        if command.fault is Fault.BYTE and command.items:
            self._resident.content.flip_byte(command.items[0])
        return Done()

    @run.register
    def _(self, _: Clear) -> AnyReply:
        self._resident.content.clear()
        return Done()

    @run.register
    def _(self, command: Check) -> AnyReply:
        return Difference(self._resident.content.difference(command.items, kv=command.kv))

    @run.register
    def _(self, command: Start) -> AnyReply:
        if self._requests is not None and self._requests.is_running:  # one that nobody has collected may have ended
            raise LocalProtocolError("a run of another driver is in progress")
        self._requests = Requests(self._resident.manager, self._resident.content, command)
        self._requests.start()
        return Done()

    @run.register
    def _(self, _: Collect) -> AnyReply:
        if self._requests is None:
            raise LocalProtocolError("no run is in progress")
        requests, self._requests = self._requests, None
        return requests.collect()

    @run.register
    def _(self, command: Move) -> AnyReply:
        return move(self._resident, command)

    @run.register
    def _(self, command: MoveRaw) -> AnyReply:
        return move_raw(self._resident, command)

    @run.register
    def _(self, command: Listen) -> AnyReply:
        arena = self._resident.pools.arena
        base = arena.__array_interface__["data"][0]
        sink = Sink(command.host, command.blocks, base=base, arena=arena, timeout_s=command.timeout_s)
        return Listening(sink.port)

    @run.register
    def _(self, command: Memcpy) -> AnyReply:
        return Copied(memcpy_gbps(self._resident.pools.arena, command.nbytes))

    @run.register
    def _(self, _: ReadCpu) -> AnyReply:
        return Cpu(time.process_time())

    @run.register
    def _(self, _: ReadHealth) -> AnyReply:
        health = self._resident.manager.health()
        return HealthReport(health.problem, {n: p.problem for n, p in health.peers.items()}, health.quarantined)

    @run.register
    def _(self, _: Exit) -> AnyReply:
        raise Exiting


_DECODER: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


class PeerWatch:
    def __init__(self, resident: ResidentRank, report: Callable[[str], None]) -> None:
        self._resident = resident
        self._report = report
        self._ready: dict[str, bool] = {}

    def check(self) -> None:
        for name, peer in self._resident.manager.health().peers.items():
            if peer.ready != self._ready.get(name, False):
                with suppress(OSError):  # nobody reads the output any more, or a disk is full: the rank goes on
                    self._report(f"{self._resident}: peer {name} is " + ("ready" if peer.ready else f"gone: {peer.problem}"))
            self._ready[name] = peer.ready


def print_line(line: str, *, form: Format) -> None:
    print(json_line(line, source=__name__) if form == "json" else line, flush=True)


class Stop:
    """Asks ranks to end. Thread-safe."""

    def __init__(self) -> None:
        self._asked, self._now = threading.Event(), threading.Event()
        self.reason = ""

    def end(self, reason: str, *, drain: bool) -> None:
        """`drain`: wait for requests first. The first reason is kept."""
        self.reason = self.reason or reason
        if not drain:
            self._now.set()
        self._asked.set()

    def wait(self, timeout_s: float) -> bool:
        return self._asked.wait(timeout_s)

    def is_set(self) -> bool:
        return self._asked.is_set()

    def is_urgent(self) -> bool:
        return self._now.is_set()


def drain(resident: ResidentRank, stop: Stop, report: Callable[[str], None]) -> None:
    """Wait up to `drain_s` for requests under way, and report what becomes of them, if the output can still be written."""

    def say(text: str) -> None:
        with suppress(OSError):
            report(f"{resident}: ends: {text}")

    manager, until = resident.manager, time.monotonic() + resident.config.drain_s
    health = manager.health()
    num_open = health.num_receiving + health.num_sending
    if not num_open or stop.is_urgent():
        say(stop.reason + (f"; {counted(num_open, 'request')} aborted" if num_open else ""))
        return
    say(f"{stop.reason}; waits for {counted(num_open, 'request')}, up to {resident.config.drain_s:g} s")
    while not manager.drain(timeout_s=POLL_S) and not stop.is_urgent() and time.monotonic() < until:
        pass
    health = manager.health()
    num_open = health.num_receiving + health.num_sending
    say(f"{counted(num_open, 'request')} aborted" if num_open else "all requests have ended")


def serve(config: RankConfig, *, stop: Stop, report: Callable[[str], None]) -> None:
    """Run a rank until `stop` or its driver ends it. Raises `DisaggError` if it cannot start, or its manager has failed.

    Reports one line once it can be reached: `NAME rank R of N: address=tcp://... driver=tcp://... ...`.
    """
    socket: zmq.Socket[bytes] | None = None
    with ExitStack() as opened:
        resident = opened.enter_context(ResidentRank(config))
        if config.driver is not None:
            socket = opened.enter_context(_driver_socket(config.driver))
        where = f" driver={socket.getsockopt_string(zmq.LAST_ENDPOINT)}" if socket else ""
        manager = resident.manager
        metrics = f" metrics={manager.metrics_url}" if manager.metrics_url else ""
        report(
            f"{resident}: address={manager.address}{where} pid={os.getpid()} model={resident.model.name} "
            f"side={config.side} backend={manager.backend.name} transport={manager.backend.transport}{metrics}"
        )
        commands, watch = Commands(resident), PeerWatch(resident, report)
        while not stop.is_set():
            watch.check()
            if socket is None:
                stop.wait(POLL_S)
            elif socket.poll(int(POLL_S * 1000)):
                try:
                    socket.send(commands.answer(socket.recv()))
                except Exiting:
                    socket.send(msgspec.msgpack.encode(Done()))
                    return
            health = manager.health()
            if not health.ok and socket is None:
                raise LocalProtocolError(f"{resident}: {health.problem}")
        drain(resident, stop, report)


def serve_together(configs: Sequence[RankConfig], *, stop: Stop) -> None:
    """Run ranks of one instance; the first is the leader. Raises the first error of any rank, once all have ended."""
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    failed: list[Exception] = []

    def run(config: RankConfig) -> None:
        def report(line: str) -> None:
            print_line(line, form=config.log_format)
            addresses.put(line)

        try:
            serve(config, stop=stop, report=report)
        except Exception as error:  # noqa: BLE001 - the thread's top: the error is raised by `serve_together`
            failed.append(error)
            stop.end(f"{config.name} rank {config.rank} has failed: {error}", drain=False)
            addresses.put("")

    threads = [threading.Thread(target=run, args=(configs[0],), name="rank-0")]
    threads[0].start()
    if len(configs) > 1:
        _, _, leader = addresses.get().partition(" address=")
        for config in configs[1:] if leader else ():
            others = msgspec.structs.replace(config, leader=leader.split()[0])
            threads.append(threading.Thread(target=run, args=(others,), name=f"rank-{config.rank}"))
            threads[-1].start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _driver_socket(address: str) -> zmq.Socket[bytes]:
    host, port = parse_address(address, what="driver")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    try:
        socket.bind(f"tcp://{bracketed(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"driver: cannot bind {address!r}: {error}") from error
    return socket
