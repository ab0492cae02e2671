"""A run on one rank: requests sent or received in order, with a bounded number in flight."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from disagg.commands.cases.content import Content
from disagg.commands.cases.instructions import Direction, Fault, Item, Result, RunReport, Start
from disagg.commands.cases.places import rows_of, streams
from disagg.core.errors import DisaggError
from disagg.core.rows import Pages, Rows
from disagg.manager import KVManager
from disagg.requests import Receiver, Sender
from disagg.runtime.accounting import Stats

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long after its deadline a request may still end."""


def payload_of(item: Item) -> bytes:
    return b"first token of %d" % item.number


class Requests:
    def __init__(self, manager: KVManager, content: Content, command: Start) -> None:
        self._manager = manager
        self._content = content
        self._command = command
        self._waiting = deque(command.items)
        self._started: dict[int, float] = {}
        self._handles: dict[int, Receiver | Sender] = {}
        self._queued_s: dict[int, float] = {}
        self._begin = 0.0
        self._cpu_began = self._cpu_ended = 0.0
        self._results: list[Result] = []
        self._before = msgspec.structs.asdict(manager.stats)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="disagg-bench-run", daemon=True)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """On return, the first `window` requests that have arrived have started."""
        time.sleep(max(0.0, self._command.at - time.monotonic()))
        self._cpu_began = time.process_time()
        self._begin = self._command.at or time.monotonic()
        self._open()
        self._thread.start()

    def collect(self) -> RunReport:
        """Wait for all requests. Raises the error that ended the thread."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        after = msgspec.structs.asdict(self._manager.stats)
        spent = Stats(**{name: after[name] - self._before[name] for name in after})
        return RunReport(
            results=tuple(self._results),
            nbytes=spent.nbytes,
            posts=spent.pieces,
            seconds=spent.phases,
            ways={way: count for way, count in spent.nbytes_by_way.items() if count},
            cpu_s=self._cpu_ended - self._cpu_began,
        )

    def _run(self) -> None:
        try:
            while self._started or self._waiting:
                self._take_ended()
                self._open()
        except Exception as error:  # a thread's top: `collect` raises it
            logger.exception("a run failed")
            self._error = error
        self._cpu_ended = time.process_time()

    def _take_ended(self) -> None:
        poller = select.poll()
        poller.register(self._manager.fileno(), select.POLLIN)
        arrives_in_s = self._arrives_in_s() if len(self._started) < self._command.window else None
        patience_s = self._command.deadline_s + GRACE_S
        if not poller.poll((patience_s if arrives_in_s is None else max(0.0, arrives_in_s)) * 1000):
            if arrives_in_s is not None:
                return
            raise TimeoutError(f"requests {sorted(self._started)} have not ended {GRACE_S} s after their deadlines")
        events, now = self._manager.events(), time.monotonic()
        for event in events:
            item: Item = event.tag
            error = "" if event.ok else str(event.error)
            if event.ok and self._command.direction is Direction.RECEIVE and event.payload != payload_of(item):
                error = f"payload: expected {payload_of(item)!r}, found {event.payload!r}"
            self._end(item, error, now)

    def _arrives_in_s(self) -> float | None:
        return self._begin + self._waiting[0].arrival_s - time.monotonic() if self._waiting else None

    def _open(self) -> None:
        """Start the requests that have arrived, as far as the window allows."""
        while len(self._started) < self._command.window and (arrives_in_s := self._arrives_in_s()) is not None:
            if arrives_in_s > 0:
                return
            item = self._waiting.popleft()
            self._started[item.number] = started = time.monotonic()
            self._queued_s[item.number] = started - self._begin - item.arrival_s
            try:
                if self._command.direction is Direction.SEND:
                    self._send(item)
                else:
                    self._receive(item)
            except DisaggError as error:
                self._end(item, str(error), time.monotonic())

    def _end(self, item: Item, error: str, now: float) -> None:
        started, queued_s = self._started.pop(item.number), self._queued_s.pop(item.number)
        result = Result(item.number, not error, error, started, now, queued_s)
        if (handle := self._handles.pop(item.number, None)) is not None:
            timeline = handle.timeline
            result = msgspec.structs.replace(result, opened_at=timeline.opened_at, phases=timeline.phases)
        self._results.append(result)

    def _receive(self, item: Item) -> None:
        self._handles[item.number] = self._manager.receiver(
            item.request_id,
            peer=self._command.peer,
            group=item.group,
            rows={state.name: rows_of(state, item) for state in self._content.states},
            need={state.name: item.needs[state.name] for state in self._content.states if state.rows == "pages"},
            deadline_s=self._command.deadline_s,
            tag=item,
        )

    def _send(self, item: Item) -> None:
        states = self._content.states
        sender = self._manager.sender(item.request_id, peer=self._command.peer, deadline_s=self._command.deadline_s, tag=item)
        self._handles[item.number] = sender
        for first, last in self._chunks(item) if any(map(streams, states)) else ():
            sender.send(self._rows(item, first, last), tokens=(first, last))
        if self._command.fault is Fault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        rest = {state.name: rows_of(state, item) for state in states if not streams(state)}
        sender.finish(rest, payload=payload_of(item))

    def _chunks(self, item: Item) -> Iterator[tuple[int, int]]:
        step = self._command.chunk_tokens or item.tokens
        return ((first, min(first + step, item.tokens)) for first in range(0, item.tokens, step))

    def _rows(self, item: Item, first: int, last: int) -> dict[str, Rows]:
        rows: dict[str, Rows] = {}
        for state in filter(streams, self._content.states):
            start, stop = self._content.page_range(item, state=state, first_token=first, last_token=last)
            chosen = list(item.rows[state.name][start:stop])
            if self._command.fault is Fault.PAGES and first == 0:
                chosen[:2] = reversed(chosen[:2])
            rows[state.name] = Pages(np.array(chosen, dtype=np.int32), first_token=first)
        return rows
