"""Loans of staging slots: which slots of a receiver each of its writers may fill now.

A loan is used once. The writer fills the slot and reports it until a `Lend` no longer lists the loan; the receiver unpacks
the slot. A `Lend` lists every loan that the receiver takes for unfilled, and is repeated while there are any, so it may be
lost, repeated or overtaken. So are loans to earlier connections of the same process: it returns them once it does not write
to their slots any more.

A writer gets slots while it holds fewer than twice as many as are free, and at most a window of them, so what it never
returns costs the others no more. Waiting writers are served in turn, a batch at a time: a message costs as much as copying
several slots.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from disagg.protocol.messages import Borrow, Filled, Lend, Lending, RequestMessage, SlotsFilled
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.timers import back_off
from disagg.protocol.types import (
    NEVER,
    Effect,
    Limits,
    PeerRank,
    RequestKey,
    SendMessage,
    TakeLoans,
    UnpackSlot,
    ids,
)


class HeldLoans(Protocol):
    """See `disagg.transfer.staging.Loans`."""

    seen: int

    @property
    def wanted(self) -> int: ...
    def listed(self, loans: Sequence[tuple[int, int]], newest: int, /) -> tuple[int, ...]:
        """Returns the loans that were given back before, or to earlier connections. Raises `RemoteProtocolError`, with
        nothing changed, for an impossible list.
        """

    def give_back(self) -> tuple[int, ...]: ...


NUMBERS_OF_PROCESS = 1 << 32
"""Numbers start at a random multiple of this, so that another process's number is not taken for one of these."""


class Slots(Protocol):
    slot_nbytes: int
    window: int
    batch: int
    total: int

    @property
    def num_free(self) -> int: ...
    @property
    def can_replace(self) -> bool: ...
    def take(self) -> int:
        """The address of a free slot. There must be one."""

    def give_back(self, address: int, /) -> None:
        """Nobody writes to the slot any more."""

    def replace(self, address: int, /) -> bool:
        """The slot may still be written: let another address replace it. Returns whether there is one."""

    def renew(self, address: int, /) -> None:
        """Nobody writes to a replaced slot any more: it may replace another."""


class _Lost(NamedTuple):
    """A slot that a lost connection may still write; `replaced`: by another address."""

    address: int
    replaced: bool


@dataclass(eq=False)
class Account:
    """The loans to one connection of a peer, as addresses by number. Numbers up to `first` are of earlier connections.
    Slots in `unpacked` are being unpacked.
    """

    peer: PeerRank
    epoch: int
    generation: int
    first: int
    newest: int
    unfilled: dict[int, int] = field(default_factory=dict)
    unpacked: dict[int, int] = field(default_factory=dict)
    wants: int = 0
    retry_at: float = NEVER
    retry_s: float = 0.0

    @property
    def num_held(self) -> int:
        return len(self.unfilled) + len(self.unpacked)


class Lender:
    """The receiver's side. `draw(n)` returns `n` random bits. Nothing is sent before `flush`."""

    def __init__(
        self,
        *,
        effects: deque[Effect],
        limits: Limits | None = None,
        slots: Slots | None = None,
        draw: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self._effects = effects
        self._limits = limits or Limits()
        self.next_tick = NEVER
        self._slots = slots
        self._numbers = itertools.count(draw(30) * NUMBERS_OF_PROCESS + 1)
        self._accounts: dict[PeerRank, Account] = {}
        self._retired: list[Account] = []  # with slots being unpacked
        self._waiting: deque[Account] = deque()
        self._changed: dict[Account, None] = {}
        self._lost: dict[tuple[PeerRank, int], dict[int, _Lost]] = {}  # by epoch, then by loan
        self._none_since = NEVER  # since when somebody asks and all are lost

    @property
    def num_lent(self) -> int:
        return sum(account.num_held for account in (*self._accounts.values(), *self._retired))

    @property
    def num_lost(self) -> int:
        """Slots that lost writers may still write, and that no other address has replaced."""
        return sum(not each.replaced for lost in tuple(self._lost.values()) for each in tuple(lost.values()))

    @property
    def problem(self) -> str:
        """Why this rank can lend few slots; empty while it can lend most."""
        lost, total = self.num_lost, self._slots.total if self._slots is not None else 0
        return f"{lost} of {total} staging slots may still be written by peers that are gone" if 2 * lost > total else ""

    @property
    def has_none(self) -> bool:
        """Whether lost writers may still write every slot."""
        return self._slots is not None and self.num_lost == self._slots.total

    @property
    def can_replace(self) -> bool:
        """Whether a slot that a lost writer may still write costs the others nothing."""
        return self._slots is not None and self._slots.can_replace

    def open(self, peer: PeerRank, epoch: int, generation: int) -> Lending | None:
        """The terms for a connection; `None` if this rank lends nothing. Loans to an earlier connection are void, but late
        writes may still come.
        """
        if self._slots is None:
            return None
        account = self._accounts.get(peer)
        if account is None or (account.epoch, account.generation) != (epoch, generation):
            if account is not None:
                self._retire(account)
            number = next(self._numbers)
            account = self._accounts[peer] = Account(peer, epoch, generation, number, number)
            if self._earlier(account):
                self._changed[account] = None
        return Lending(slot_nbytes=self._slots.slot_nbytes, first=account.first)

    def ahead(self, peer: PeerRank) -> None:
        """Lend to a writer that has been asked for bytes and holds no slot, while most are free."""
        account = self._accounts.get(peer)
        if account is None or self._slots is None or account.num_held:
            return
        if self._slots.num_free > self._slots.total // 2:
            self._lend(account, max(1, self._slots.batch // 2))

    def on_borrow(self, peer: PeerRank, message: Borrow, now: float) -> str:
        """The writer could fill `wanted` slots beyond those it had seen. Returns why it might wait for ever for one: lost
        writers may still write all of them, and have had the time to come back or to be proved quiet.
        """
        account = self._accounts.get(peer)
        if account is None or self._slots is None:
            return ""
        for number in message.returned:
            address = account.unfilled.pop(number, None)
            if address is not None:
                self._slots.give_back(address)
            elif (lost := self._earlier(account).pop(number, None)) is not None:
                self._reuse(lost)
        if not self._earlier(account):
            self._lost.pop((account.peer, account.epoch), None)
        unseen = sum(number > message.seen for number in account.unfilled)
        account.wants = max(0, message.wanted - unseen)
        if account.wants and account not in self._waiting:
            self._waiting.append(account)
        if message.wanted:
            self._changed[account] = None  # it asks until it gets an answer
        self._serve()
        self._none_since = min(self._none_since, now) if self.has_none else NEVER
        return self.problem if message.wanted and now >= self._none_since + self._limits.drain_timeout_s else ""

    def on_filled(self, peer: PeerRank, filled: Filled, begin: Callable[[], ReceiveSession | None]) -> None:
        """Unpack a slot into the session that `begin` returns; `None` frees it at once. A loan reported before, or not the
        writer's, changes nothing.
        """
        account = self._accounts.get(peer)
        if account is None or self._slots is None:
            return
        address = account.unfilled.pop(filled.loan, None)
        if address is None:
            if filled.loan not in account.unpacked:
                self._changed[account] = None  # it does not know yet that this has arrived
            return
        session = begin() if 0 < filled.nbytes <= self._slots.slot_nbytes else None
        if session is None:
            self._slots.give_back(address)
            self._changed[account] = None
            self._serve()
            return
        account.unpacked[filled.loan] = address
        self._effects.append(UnpackSlot(peer, session, filled, address, account))

    def unpacked(self, slot: UnpackSlot) -> None:
        assert self._slots is not None
        account: Account = slot.account
        self._slots.give_back(account.unpacked.pop(slot.filled.loan))
        if not account.unpacked:
            if self._accounts.get(account.peer) is not account:
                self._retired.remove(account)
            elif not account.wants:
                self._changed[account] = None  # else the next loans tell it
        self._serve()

    def _serve(self) -> None:
        assert self._slots is not None
        for _ in range(len(self._waiting)):
            if not self._slots.num_free:
                break
            account = self._waiting.popleft()
            account.wants -= self._lend(account, account.wants)
            if account.wants:
                self._waiting.append(account)

    def _lend(self, account: Account, count: int) -> int:
        """Lend up to `count` slots. Returns how many."""
        slots = self._slots
        assert slots is not None
        held, free = account.num_held, slots.num_free
        # Each loan adds one to what it holds and takes one from `free`. Those to earlier connections of the process count as
        # held if other addresses have replaced them; the rest is not free either.
        kept = sum(lost.replaced for lost in self._earlier(account).values())
        allowed = min(count, slots.window - held, (2 * free - held - kept + 2) // 3)
        if not held and free:
            allowed = max(allowed, min(count, 1))
        if held and allowed < min(count, slots.batch):
            return 0
        for _ in range(allowed):
            account.newest = next(self._numbers)
            account.unfilled[account.newest] = slots.take()
            self._changed[account] = None
        return max(allowed, 0)

    def peer_lost(self, peer: PeerRank, epoch: int, generation: int) -> None:
        """Loans to a later generation stay."""
        account = self._accounts.get(peer)
        if account is not None and account.epoch == epoch and account.generation <= generation:
            self._retire(self._accounts.pop(peer))

    def forget(self, instance: str) -> None:
        """Drop the instance's accounts: ranks that were never connected were not reported as lost."""
        for peer in [peer for peer in self._accounts if peer.instance == instance]:
            self._retire(self._accounts.pop(peer))

    def _retire(self, account: Account) -> None:
        """Slots that the connection may still write to are not lent before the process returns them on a later connection,
        or `peer_quiet`, which may never come. Other addresses replace them, as long as there are any.
        """
        assert self._slots is not None
        self._changed.pop(account, None)
        if account.unfilled:
            lost = self._lost.setdefault((account.peer, account.epoch), {})
            lost |= {number: _Lost(address, self._slots.replace(address)) for number, address in account.unfilled.items()}
        account.unfilled.clear()
        if account in self._waiting:
            self._waiting.remove(account)
        if account.unpacked:
            self._retired.append(account)
        self._serve()

    def peer_quiet(self, peer: PeerRank, epoch: int) -> None:
        for lost in self._lost.pop((peer, epoch), {}).values():
            self._reuse(lost)
        if self._slots is not None:
            self._serve()

    def unproved(self) -> set[tuple[PeerRank, int]]:
        """The ranks that `peer_quiet` would give slots back for, by epoch."""
        return set(self._lost)

    def _reuse(self, lost: _Lost) -> None:
        """Nobody writes to the slot any more."""
        assert self._slots is not None
        (self._slots.renew if lost.replaced else self._slots.give_back)(lost.address)

    def _earlier(self, account: Account) -> dict[int, _Lost]:
        """The slots lent to earlier connections of the same process, by loan."""
        return self._lost.get((account.peer, account.epoch), {})

    def tick(self, now: float) -> None:
        """List loans again: the message or its answer may be lost."""
        if now < self.next_tick:
            return
        self.next_tick = NEVER
        for account in self._accounts.values():
            if not (account.unfilled or self._earlier(account)):
                continue
            if now >= account.retry_at:
                self._list(account, now)
            self.next_tick = min(self.next_tick, account.retry_at)

    def flush(self, now: float) -> None:
        changed, self._changed = self._changed, {}
        for account in changed:
            account.retry_s = 0.0
            self._list(account, now)
            self.next_tick = min(self.next_tick, account.retry_at)

    def _list(self, account: Account, now: float) -> None:
        account.retry_at = NEVER
        assert self._slots is not None
        earlier = ((number, lost.address) for number, lost in reversed(self._earlier(account).items()))
        loans = (*account.unfilled.items(), *itertools.islice(earlier, self._slots.total))  # the others once these are back
        if loans:
            back_off(account, self._limits, now)
        self._effects.append(SendMessage(account.peer, Lend(loans=loans, newest=account.newest)))


M = TypeVar("M", SlotsFilled, Borrow)


@dataclass
class _Repeated(Generic[M]):
    message: M
    retry_at: float = 0.0
    retry_s: float = 0.0


class Borrower:
    """The writer's side. Nothing is sent before `flush`."""

    def __init__(self, *, limits: Limits, effects: deque[Effect]) -> None:
        self._limits = limits
        self._effects = effects
        self._outbox: list[tuple[PeerRank, SlotsFilled | Borrow]] = []
        self._reported: dict[PeerRank, dict[int, _Repeated[SlotsFilled]]] = {}
        self._wishes: dict[PeerRank, _Repeated[Borrow]] = {}  # that the receiver may know of

    def report(self, peer: PeerRank, key: RequestKey, nonce: int, filled: Filled, now: float) -> None:
        """Report a filled slot until the receiver no longer lists its loan."""
        message = SlotsFilled(**ids(key), nonce=nonce, slots=(filled,))
        repeated = self._reported.setdefault(peer, {})[filled.loan] = _Repeated(message)
        back_off(repeated, self._limits, now)
        self._outbox.append((peer, message))

    def want(self, peer: PeerRank, loans: HeldLoans, now: float) -> None:
        """Ask for as many slots as could be filled, until some come."""
        if loans.wanted:
            self._ask(peer, Borrow(wanted=loans.wanted, seen=loans.seen), now)

    def give_back(self, peer: PeerRank, loans: HeldLoans, now: float, *, forgotten: tuple[int, ...] = ()) -> None:
        """Return all unused loans and withdraw the request for more: no request is open towards the peer."""
        returned = (*forgotten, *loans.give_back())
        if returned or peer in self._wishes:
            self._ask(peer, Borrow(wanted=0, seen=loans.seen, returned=returned), now)

    def take(self, lent: TakeLoans, loans: HeldLoans, now: float, *, is_open: bool) -> None:
        """Take the loans that a receiver has listed. All go back unless a request `is_open`. Loans given back before are
        given back again: that message was lost or is late. Raises `RemoteProtocolError` as `HeldLoans.listed` does.
        """
        forgotten = loans.listed(lent.loans, lent.newest)
        if not is_open:
            self.give_back(lent.peer, loans, now, forgotten=forgotten)
        elif forgotten:
            self._ask(lent.peer, Borrow(wanted=loans.wanted, seen=loans.seen, returned=forgotten), now)
        elif loans.wanted:
            self._repeat(lent.peer, Borrow(wanted=loans.wanted, seen=loans.seen), now)

    def _repeat(self, peer: PeerRank, message: Borrow, now: float) -> None:
        repeated = self._wishes[peer] = _Repeated(message)
        back_off(repeated, self._limits, now)

    def _ask(self, peer: PeerRank, message: Borrow, now: float) -> None:
        """Send a request, and resend it until answered if it wants slots. Returned loans are not repeated: the receiver
        keeps listing those it has not got back, and `take` returns them again.
        """
        self._wishes.pop(peer, None)
        if message.wanted:
            self._repeat(peer, msgspec.structs.replace(message, returned=()), now)
        self._outbox.append((peer, message))

    def on_lend(self, peer: PeerRank, message: Lend) -> None:
        reported = self._reported.get(peer)
        if reported:
            listed = {number for number, _ in message.loans}
            for number in [each for each in reported if each <= message.newest and each not in listed]:
                del reported[number]
            if not reported:
                del self._reported[peer]
        wish = self._wishes.get(peer)
        if wish is not None and message.newest > wish.message.seen:
            wish.retry_at = NEVER
        self._effects.append(TakeLoans(peer, message.loans, message.newest))

    def peer_lost(self, peer: PeerRank) -> None:
        self._reported.pop(peer, None)
        self._wishes.pop(peer, None)

    def _repeated(self) -> Iterator[tuple[PeerRank, _Repeated[SlotsFilled] | _Repeated[Borrow]]]:
        for peer, found in self._reported.items():
            yield from ((peer, each) for each in found.values())
        yield from self._wishes.items()

    def tick(self, now: float) -> None:
        for peer, repeated in self._repeated():
            if now >= repeated.retry_at:
                back_off(repeated, self._limits, now)
                self._outbox.append((peer, repeated.message))

    @property
    def next_tick(self) -> float:
        return min((repeated.retry_at for _, repeated in self._repeated()), default=NEVER)

    def flush(self) -> None:
        """Filled slots of one request share a message."""
        if not self._outbox:
            return
        slots: dict[tuple[PeerRank, RequestKey, int], list[Filled]] = {}
        outbox, self._outbox = self._outbox, []
        for peer, message in outbox:
            if isinstance(message, RequestMessage):
                key = RequestKey(message.request_id, message.attempt)
                slots.setdefault((peer, key, message.nonce), []).extend(message.slots)
            else:
                self._effects.append(SendMessage(peer, message))
        for (peer, key, nonce), filled in slots.items():
            self._effects.append(SendMessage(peer, SlotsFilled(**ids(key), nonce=nonce, slots=tuple(filled))))
