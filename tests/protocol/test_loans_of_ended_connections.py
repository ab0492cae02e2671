"""Loans to a process that loses its connection again and again, in random schedules: a slot that is written, or may be, is
nobody else's, and in the end every slot is free.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import pytest

from disagg.core.memory import RemoteRegion
from disagg.protocol.loans import Borrower, Lender
from disagg.protocol.messages import Borrow, Lend, Message, SlotsFilled
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.types import Effect, Limits, PeerRank, RequestKey, SendMessage, TakeLoans, UnpackSlot
from disagg.transfer.staging import Loans
from tests.protocol.test_loans import Pool, filled

WRITER, READER = PeerRank("prefill-0", 0), PeerRank("decode-0", 0)
KEY = RequestKey(bytes(16), 0)
EPOCH = 7


class Pair:
    """A writer and its reader. `writes` are under way, over any connection."""

    def __init__(self, rng: random.Random, *, spare: int) -> None:
        self.rng, self.now = rng, 0.0
        self.pool = Pool(total=6, window=4, spare=spare)
        self.lender = Lender(effects=deque[Effect](), slots=self.pool, draw=lambda _: 0)
        self.borrower = Borrower(limits=Limits(), effects=deque[Effect]())
        self.generation, self.writing = 0, set[int]()
        self.loans: Loans | None = None
        self.writes: list[tuple[Loans, int, int]] = []
        self.to_reader: deque[Message] = deque()
        self.to_writer: deque[Message] = deque()
        self.connect()

    def connect(self) -> None:
        if self.loans is not None:
            return
        lending = self.lender.open(WRITER, EPOCH, self.generation)
        assert lending is not None
        self.loans = Loans(lending.slot_nbytes, lending.first, (RemoteRegion(1, 1 << 40),), self.writing)
        self.loans.want(4)

    def lose(self) -> None:
        """Messages under way are lost."""
        if self.loans is None:
            return
        self.loans.close()
        self.loans = None
        self.borrower.peer_lost(READER)
        self.lender.peer_lost(WRITER, EPOCH, self.generation)
        self.generation += 1
        self.to_reader.clear()
        self.to_writer.clear()

    def write(self) -> None:
        if self.loans is None:
            return
        if (loan := self.loans.take()) is None:
            self.borrower.want(READER, self.loans, self.now)
            return
        self.loans.want(1)
        self.writes.append((self.loans, *loan))
        self.check()

    def end_write(self) -> None:
        if not self.writes:
            return
        loans, number, address = self.writes.pop(self.rng.randrange(len(self.writes)))
        if self.rng.random() < 0.3:
            loans.put_back(number, address)
            return
        loans.written(number)
        if loans is self.loans:
            self.borrower.report(READER, KEY, 5, filled(number), self.now)

    def deliver(self, *, is_open: bool = True) -> None:
        if self.to_reader:
            self._read(self.to_reader.popleft())
        if self.to_writer:
            message = self.to_writer.popleft()
            assert isinstance(message, Lend)
            self.borrower.on_lend(READER, message)
            taken = self.borrower._effects.pop()
            assert isinstance(taken, TakeLoans)
            if self.loans is not None:
                self.borrower.take(taken, self.loans, self.now, is_open=is_open)
        self.check()

    def _read(self, message: Message) -> None:
        if isinstance(message, Borrow):
            self.lender.on_borrow(WRITER, message, 0.0)
            return
        assert isinstance(message, SlotsFilled)
        for each in message.slots:
            self.lender.on_filled(WRITER, each, lambda: ReceiveSession(KEY, "prefill-0", 5, 0, 0, {}, {}, {}, 1.0, None))

    def tick(self) -> None:
        self.now += self.rng.choice((0.0, 0.01, 3.0))
        self.lender.tick(self.now)
        self.borrower.tick(self.now)

    def flush(self) -> None:
        self.lender.flush(self.now)
        self.borrower.flush()
        for effects, queue in ((self.lender._effects, self.to_writer), (self.borrower._effects, self.to_reader)):
            while effects:
                effect = effects.popleft()
                if isinstance(effect, UnpackSlot):
                    self.lender.unpacked(effect)
                elif isinstance(effect, SendMessage) and self.loans is not None and self.rng.random() < 0.9:
                    queue.append(effect.message)

    def check(self) -> None:
        addresses = [address for _, _, address in self.writes]
        assert len(addresses) == len(set(addresses)), "two writes to one slot"
        assert not set(addresses) & set(self.pool.free), "a slot that is being written is free"

    def settle(self) -> None:
        """Everything ends, and the connection is back."""
        self.connect()
        while self.writes:
            self.end_write()
        for _ in range(200):
            self.now += 3.0
            self.lender.tick(self.now)
            self.borrower.tick(self.now)
            self.flush()
            self.deliver()
        assert self.loans is not None
        self.borrower.give_back(READER, self.loans, self.now)
        for _ in range(200):
            self.now += 3.0
            self.lender.tick(self.now)
            self.flush()
            self.deliver(is_open=False)


def run(seeds: Iterable[int], *, spare: int) -> Iterator[Pair]:
    for seed in seeds:
        rng = random.Random(seed)
        pair = Pair(rng, spare=spare)
        steps: tuple[Callable[[], None], ...] = (pair.write, pair.write, pair.end_write, pair.deliver, pair.deliver, pair.tick)
        for _ in range(150):
            step = rng.choice((pair.lose, pair.connect)) if rng.random() < 0.08 else rng.choice(steps)
            step()
            pair.flush()
        pair.settle()
        yield pair


@pytest.mark.parametrize("spare", [0, 100])
def test_no_slot_is_lost_or_used_twice_whatever_connections_end(spare: int) -> None:
    for pair in run(range(150), spare=spare):
        assert (pair.pool.num_free, pair.lender.num_lost, pair.pool.spare) == (6, 0, spare)
        assert not pair.writing


def test_these_schedules_find_a_writer_that_returns_slots_which_it_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Loans.listed

    def broken(self: Loans, loans: tuple[tuple[int, int], ...], newest: int) -> tuple[int, ...]:
        self._writing.clear()
        return listed(self, loans, newest)

    monkeypatch.setattr(Loans, "listed", broken)
    with pytest.raises(AssertionError, match=r"a slot that is being written is free|two writes to one slot"):
        list(run(range(150), spare=0))
