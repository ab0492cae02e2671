"""Loans of slots: who gets how many, what is listed, and what lost, repeated and late messages change."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

import pytest

from disagg.protocol.loans import Borrower, Lender
from disagg.protocol.messages import Borrow, Filled, Lend, Lending, Part, SlotsFilled, decode, encode
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.types import Effect, Limits, PeerRank, RequestKey, SendMessage, TakeLoans, UnpackSlot

PEER, SIBLING = PeerRank("prefill-0", 0), PeerRank("prefill-0", 1)
KEY = RequestKey(bytes(16), 0)
NEVER = float("inf")


class Pool:
    """Slots of 512 bytes; `spare` of them can be replaced."""

    slot_nbytes = 512

    def __init__(self, total: int = 12, window: int = 4, spare: int = 0, batch: int = 1) -> None:
        self.total, self.window, self.batch = total, window, batch
        self.unused = [(1 << 20) + 4096 * number for number in range(spare)]
        self.free = [4096 * number for number in range(1, total + 1)]

    @property
    def num_free(self) -> int:
        return len(self.free)

    def take(self) -> int:
        return self.free.pop(0)

    def give_back(self, address: int) -> None:
        assert address not in self.free
        self.free.append(address)

    @property
    def spare(self) -> int:
        return len(self.unused)

    @property
    def can_replace(self) -> bool:
        return self.spare > 0

    def replace(self, address: int) -> bool:
        if not self.unused:
            return False
        self.free.append(self.unused.pop(0))
        return True

    def renew(self, address: int) -> None:
        assert address not in (*self.free, *self.unused)
        self.unused.append(address)


def make(pool: Pool, *peers: PeerRank) -> Lender:
    """A lender with an account for each peer at epoch 7. Its first loan after them has number 1 + the number of peers."""
    lender = Lender(effects=deque[Effect](), slots=pool, draw=lambda _: 0)
    for peer in peers:
        lender.open(peer, 7, 0)
    return lender


def told(lender: Lender | Borrower) -> list[tuple[PeerRank, object]]:
    """The messages since the last call, which must be the only effects."""
    lender.flush(0.0) if isinstance(lender, Lender) else lender.flush()
    effects = list(lender._effects)
    lender._effects.clear()
    assert all(isinstance(effect, SendMessage) for effect in effects)
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, SendMessage)]


def listed(lender: Lender) -> dict[PeerRank, tuple[tuple[int, int], ...]]:
    """The loans that each peer was told of since the last call."""
    return {peer: message.loans for peer, message in told(lender) if isinstance(message, Lend)}


def wants(lender: Lender, peer: PeerRank, wanted: int, *, seen: int = 0, returned: Iterable[int] = ()) -> None:
    lender.on_borrow(peer, Borrow(wanted=wanted, seen=seen, returned=tuple(returned)), 0.0)


def session() -> ReceiveSession:
    return ReceiveSession(KEY, "prefill-0", 5, 0, 0, {}, {}, {}, 1.0, None)


def filled(loan: int, nbytes: int = 100) -> Filled:
    return Filled(loan, 0, (Part("kv", (0,), None, 0, 4),), 0, nbytes)


def unpack_of(
    lender: Lender, found: Filled, begin: Callable[[], ReceiveSession | None] = session, peer: PeerRank = PEER
) -> UnpackSlot | None:
    """The unpacking that a filled slot starts, or None."""
    lender.on_filled(peer, found, begin)
    effects = [lender._effects.pop() for _ in range(len(lender._effects))]
    assert len(effects) <= 1
    assert all(isinstance(effect, UnpackSlot) for effect in effects)
    return next((effect for effect in effects if isinstance(effect, UnpackSlot)), None)


def test_a_connection_keeps_its_terms_and_a_new_one_gets_others() -> None:
    lender = make(Pool())
    first = lender.open(PEER, 7, 0)
    assert first == Lending(slot_nbytes=512, first=1)
    assert lender.open(PEER, 7, 0) == first
    assert lender.open(PEER, 7, 1) == Lending(slot_nbytes=512, first=2)
    assert Lender(effects=deque()).open(PEER, 7, 0) is None


def test_one_writer_gets_a_window_and_others_a_part_of_what_is_left() -> None:
    pool = Pool(total=12, window=4)
    alone = make(pool, PEER)
    wants(alone, PEER, 100)
    assert len(listed(alone)[PEER]) == 4
    pool = Pool(total=12, window=8)
    peers = [PeerRank(f"prefill-{number}", 0) for number in range(5)]
    lender = make(pool, *peers)
    for peer in peers:
        wants(lender, peer, 100)
    held = [len(loans) for loans in listed(lender).values()]
    assert held == [8, 3, 1, 0, 0], "each holds no more than twice what is left; the last are told that they wait"


def test_what_one_writer_never_returns_costs_the_others_no_more_than_a_share() -> None:
    pool = Pool(total=12, window=12)
    lender = make(pool, PEER, SIBLING)
    wants(lender, PEER, 100)
    assert pool.num_free == 4
    for _ in range(20):
        wants(lender, SIBLING, 2, seen=lender._accounts[SIBLING].newest)
        ((number, _), *others) = listed(lender)[SIBLING]
        wants(lender, PEER, 100)
        for each in (number, *(other for other, _ in others)):
            unpack = unpack_of(lender, filled(each), peer=SIBLING)
            assert unpack is not None
            lender.unpacked(unpack)
        assert len(lender._accounts[PEER].unfilled) == 8


def test_writers_that_wait_are_served_in_turn() -> None:
    pool = Pool(total=1, window=1)
    peers = [PeerRank(f"prefill-{number}", 0) for number in range(3)]
    lender = make(pool, *peers)
    for peer in peers:
        wants(lender, peer, 5)
    served = []
    for _ in range(7):
        ((peer, loans),) = ((peer, loans) for peer, loans in listed(lender).items() if loans)
        served.append(peer)
        unpack = unpack_of(lender, filled(loans[0][0]), peer=peer)
        assert unpack is not None
        lender.unpacked(unpack)
    assert served[1:] == [*peers, *peers], "the first had asked before the others"


def test_a_writer_that_holds_slots_gets_others_by_the_batch() -> None:
    pool = Pool(total=12, window=6, batch=3)
    lender = make(pool, PEER)
    wants(lender, PEER, 9)
    loans = listed(lender)[PEER]
    assert len(loans) == 6
    told_of = []
    for number, _ in loans:
        unpack = unpack_of(lender, filled(number))
        assert unpack is not None
        lender.unpacked(unpack)
        told_of.append(len(listed(lender).get(PEER, ())))
    assert told_of == [0, 0, 6, 5, 4, 3], "no message before there are three to lend, or nothing more is wanted"


def test_slots_go_ahead_to_a_writer_without_loans_while_most_are_free() -> None:
    pool = Pool(total=4, window=4, batch=4)
    lender = make(pool, PEER, SIBLING)
    lender.ahead(PEER)
    lender.ahead(PEER)
    assert len(listed(lender)[PEER]) == 2
    lender.ahead(SIBLING)
    assert listed(lender) == {}, "half of them serve who asks"
    lender.ahead(PeerRank("unknown", 0))
    wants(lender, SIBLING, 1)
    assert len(listed(lender)[SIBLING]) == 1


@pytest.mark.parametrize("spare", [0, 1])
def test_a_lender_says_when_it_can_lend_nothing_any_more(spare: int) -> None:
    lender = make(Pool(total=2, spare=spare), PEER, SIBLING)
    assert lender.can_replace is (spare > 0)
    third, one, none, later = (
        PeerRank("decode-0", 0),
        Borrow(wanted=1, seen=0),
        Borrow(wanted=0, seen=0),
        Limits().drain_timeout_s,
    )
    lender.open(third, 7, 0)
    for peer in (PEER, SIBLING):
        assert lender.on_borrow(peer, one, 0.0) == ""
    lender.peer_lost(PEER, 7, 0)
    lender.peer_lost(SIBLING, 7, 0)
    assert lender.on_borrow(third, one, 1.0) == "", "they may come back"
    assert lender.on_borrow(third, none, 1.0 + later) == ""
    problem = "" if spare else "2 of 2 staging slots may still be written by peers that are gone"
    assert lender.on_borrow(third, one, 1.0 + later) == problem
    assert not lender.can_replace
    lender.peer_quiet(PEER, 7)
    assert lender.on_borrow(third, one, 2.0 + later) == ""
    assert not Lender(effects=deque[Effect]()).can_replace


def test_a_request_for_slots_counts_what_the_writer_has_not_seen() -> None:
    lender = make(Pool(total=40, window=20), PEER)
    wants(lender, PEER, 3, seen=1)
    assert [number for number, _ in listed(lender)[PEER]] == [2, 3, 4]
    wants(lender, PEER, 3, seen=1)
    assert len(listed(lender)[PEER]) == 3, "the answer was lost or is late: nothing more is lent, and it is sent again"
    wants(lender, PEER, 3, seen=4)
    assert len(listed(lender)[PEER]) == 6


def test_returned_loans_are_free_again() -> None:
    pool = Pool(total=4, window=4)
    lender = make(pool, PEER, SIBLING)
    wants(lender, PEER, 2)
    numbers = [number for number, _ in listed(lender)[PEER]]
    wants(lender, SIBLING, 0, returned=numbers)
    assert pool.num_free == 2, "they are not its own"
    wants(lender, PEER, 0, seen=numbers[-1], returned=[*numbers, 77])
    wants(lender, PEER, 0, seen=numbers[-1], returned=numbers)
    assert pool.num_free == 4
    assert unpack_of(lender, filled(numbers[0])) is None


def test_loans_go_on_after_more_than_32_bits_can_number() -> None:
    """From the highest number that a process may start with. Every message is read as the other side gets it."""
    pool = Pool(total=4, window=2)
    lender = Lender(effects=deque[Effect](), slots=pool, draw=lambda bits: (1 << bits) - 1)
    lender._numbers = itertools.count(next(lender._numbers) + (1 << 32) - 3)
    first = lender.open(PEER, 7, 0)
    assert first is not None
    seen = first.first
    for _ in range(6):
        lender.on_borrow(PEER, cast("Borrow", decode(encode(Borrow(wanted=1, seen=seen)))), 0.0)
        ((_, message),) = told(lender)
        lend = decode(encode(cast("Lend", message)))
        assert isinstance(lend, Lend)
        ((number, address),) = lend.loans
        assert seen < number == lend.newest
        report = decode(encode(SlotsFilled(request_id=KEY.request_id, attempt=0, nonce=5, slots=(filled(number),))))
        assert isinstance(report, SlotsFilled)
        unpack = unpack_of(lender, report.slots[0])
        assert unpack is not None
        assert unpack.address == address
        lender.unpacked(unpack)
        assert told(lender) == [(PEER, Lend(loans=(), newest=number))]
        seen = number
    assert seen > 1 << 62
    assert pool.num_free == 4


def test_a_slot_is_unpacked_once_and_told_at_every_report() -> None:
    pool = Pool(total=4, window=2)
    lender, calls = make(pool, PEER), []
    wants(lender, PEER, 1)
    ((number, address),) = listed(lender)[PEER]

    def begin() -> ReceiveSession:
        calls.append(1)
        return session()

    unpack = unpack_of(lender, filled(number), begin)
    assert unpack is not None
    assert unpack.address == address
    assert unpack_of(lender, filled(number), begin) is None
    assert listed(lender) == {}, "nothing is told before the slot is unpacked"
    lender.unpacked(unpack)
    assert told(lender) == [(PEER, Lend(loans=(), newest=number))]
    assert unpack_of(lender, filled(number), begin) is None
    assert told(lender) == [(PEER, Lend(loans=(), newest=number))], "the first message may have been lost"
    assert len(calls) == 1
    assert pool.num_free == 4


def test_a_slot_of_an_ended_request_is_free_without_unpacking() -> None:
    pool = Pool(total=4)
    lender = make(pool, PEER)
    wants(lender, PEER, 1)
    ((number, _),) = listed(lender)[PEER]
    assert unpack_of(lender, filled(number), lambda: None) is None
    assert told(lender) == [(PEER, Lend(loans=(), newest=number))]
    assert pool.num_free == 4


@pytest.mark.parametrize("nbytes", [0, 513])
def test_a_slot_with_an_impossible_length_is_not_unpacked(nbytes: int) -> None:
    lender = make(Pool(), PEER)
    wants(lender, PEER, 1)
    ((number, _),) = listed(lender)[PEER]
    assert unpack_of(lender, filled(number, nbytes)) is None


def test_slots_that_were_not_lent_to_a_writer_are_not_unpacked() -> None:
    pool = Pool()
    lender = make(pool, PEER, SIBLING)
    assert unpack_of(lender, filled(1), peer=PeerRank("unknown", 0)) is None
    wants(lender, SIBLING, 1)
    ((number, _),) = listed(lender)[SIBLING]
    assert unpack_of(lender, filled(number)) is None
    assert unpack_of(lender, filled(number + 1)) is None
    assert unpack_of(lender, filled(number), peer=SIBLING) is not None


def test_loans_of_a_lost_writer_come_back_with_the_proof() -> None:
    pool = Pool(total=4, window=4)
    lender = make(pool, PEER)
    wants(lender, PEER, 2)
    (first, _), _ = listed(lender)[PEER]
    unpack = unpack_of(lender, filled(first))
    assert unpack is not None
    lender.peer_lost(PEER, 6, 0)
    assert lender.num_lost == 0, "another process"
    lender.peer_lost(PEER, 7, 0)
    lender.unpacked(unpack)
    assert (pool.num_free, lender.num_lost, lender.num_lent) == (3, 1, 0)
    assert told(lender) == []
    lender.open(PEER, 8, 0)
    assert unpack_of(lender, filled(first + 1)) is None, "a late report of the process that has ended"
    lender.peer_quiet(PEER, 8)
    assert pool.num_free == 3
    assert lender.unproved() == {(PEER, 7)}
    lender.peer_quiet(PEER, 7)
    lender.peer_quiet(PEER, 7)
    assert (pool.num_free, lender.num_lost) == (4, 0)


def test_loans_of_a_lost_writer_are_replaced_as_long_as_there_are_addresses() -> None:
    pool = Pool(total=4, window=4, spare=1)
    lender = make(pool, PEER)
    wants(lender, PEER, 2)
    lent = {address for _, address in listed(lender)[PEER]}
    lender.peer_lost(PEER, 7, 0)
    assert (pool.num_free, pool.spare, lender.num_lost) == (3, 0, 1)
    assert not lent & set(pool.free)
    lender.peer_quiet(PEER, 7)
    assert (pool.num_free, pool.spare, lender.num_lost) == (4, 1, 0), "the replaced address may take the place of another"


def test_a_rank_that_connects_again_and_again_leaves_slots_for_others() -> None:
    pool = Pool(total=8, window=4, spare=100)
    lender = make(pool, PEER, SIBLING)
    lent = []
    for generation in range(1, 20):
        wants(lender, PEER, 4)
        loans, first = listed(lender)[PEER], lender._accounts[PEER].first
        lent.append(sum(number > first for number, _ in loans))
        assert len(loans) <= 4 + pool.total, "not all of the others at once"
        lender.open(PEER, 7, generation)
    assert lent == [4, 4, 3, 2, *[1] * 15], "those it has not given back count as held"
    assert pool.spare == 100 - sum(lent)
    wants(lender, SIBLING, 4)
    assert len(listed(lender)[SIBLING]) == 4
    lender.on_borrow(PEER, Borrow(wanted=4, seen=0, returned=tuple(lender._lost[PEER, 7])), 0.0)
    assert len(lender._accounts[PEER].unfilled) == 3
    lender.peer_lost(PEER, 7, generation)
    lender.peer_quiet(PEER, 7)
    assert (pool.spare, lender.num_lost) == (100, 0)


@pytest.mark.parametrize("spare", [0, 3])
def test_a_process_whose_earlier_writes_never_settle_still_gets_a_slot(spare: int) -> None:
    """As after a cut link, over RDMA or on GPUs."""
    pool = Pool(total=4, window=4, spare=spare)
    lender = make(pool, PEER)
    wants(lender, PEER, 4)
    assert len(lender._accounts[PEER].unfilled) == 3
    lender.open(PEER, 7, 1)
    wants(lender, PEER, 4)
    assert len(lender._accounts[PEER].unfilled) >= 1


def test_a_rank_says_that_peers_which_are_gone_may_write_to_most_of_its_slots() -> None:
    pool = Pool(total=4, window=3)
    lender = make(pool, PEER)
    assert lender.problem == ""
    wants(lender, PEER, 3)
    lender.peer_lost(PEER, 7, 0)
    assert lender.problem == "3 of 4 staging slots may still be written by peers that are gone"
    lender.peer_quiet(PEER, 7)
    assert lender.problem == ""


def test_a_renewed_connection_keeps_its_own_loans() -> None:
    pool = Pool(total=8, window=4)
    lender = make(pool, PEER)
    wants(lender, PEER, 2)
    old = listed(lender)[PEER]
    lender.open(PEER, 7, 1)
    wants(lender, PEER, 1)
    lender.peer_lost(PEER, 7, 0)
    assert (pool.num_free, lender.num_lost, lender.num_lent) == (5, 2, 1)
    assert unpack_of(lender, filled(old[0][0])) is None
    lender.peer_quiet(PEER, 7)
    assert (pool.num_free, lender.num_lost, lender.num_lent) == (7, 0, 1)


# -- the writer's side -----------------------------------------------------------------------------------------------


def borrower() -> Borrower:
    return Borrower(limits=Limits(retry_s=1.0, max_retry_s=2.0), effects=deque[Effect]())


def lend(writer: Borrower, *loans: int, newest: int) -> None:
    """Take a list of loans, and check that it is passed on."""
    found = tuple((number, 4096 * number) for number in loans)
    writer.on_lend(PEER, Lend(loans=found, newest=newest))
    assert writer._effects.pop() == TakeLoans(PEER, found, newest)


def test_a_filled_slot_is_reported_until_it_is_listed_no_more() -> None:
    writer = borrower()
    slot = Filled(4, 3, (), 0, 64)
    writer.report(PEER, KEY, 9, slot, 0.0)
    assert told(writer) == [(PEER, SlotsFilled(request_id=KEY.request_id, attempt=0, nonce=9, slots=(slot,)))]
    assert writer.next_tick == 1.0
    for now, expected in ((0.5, 0), (1.0, 1), (2.0, 0), (3.0, 1)):
        writer.tick(now)
        assert len(told(writer)) == expected
    lend(writer, newest=3)  # overtaken: it knows nothing of loan 4
    lend(writer, 4, 5, newest=5)
    assert writer.next_tick < NEVER
    lend(writer, 5, newest=5)
    assert writer.next_tick == NEVER
    writer.report(PEER, KEY, 9, Filled(5, 3, (), 0, 64), 9.0)
    writer.peer_lost(PEER)
    assert writer.next_tick == NEVER


class Held:
    """The loans that a writer holds: `wanted` more, and `free` ones."""

    def __init__(self, wanted: int = 0, seen: int = 0, free: tuple[int, ...] = (), forgotten: tuple[int, ...] = ()) -> None:
        self.wanted, self.seen, self.free, self.forgotten = wanted, seen, free, forgotten

    def listed(self, loans: object, newest: int) -> tuple[int, ...]:
        self.seen = newest
        return self.forgotten

    def give_back(self) -> tuple[int, ...]:
        free, self.free = self.free, ()
        return free


def test_slots_are_asked_for_until_some_come() -> None:
    writer = borrower()
    writer.want(PEER, Held(wanted=3, seen=4), 0.0)
    assert told(writer) == [(PEER, Borrow(wanted=3, seen=4))]
    lend(writer, newest=4)
    writer.tick(1.0)
    assert told(writer) == [(PEER, Borrow(wanted=3, seen=4))]
    lend(writer, 5, newest=5)
    assert writer.next_tick == NEVER
    writer.want(PEER, Held(seen=5), 0.0)
    assert told(writer) == []
    writer.want(PEER, Held(wanted=3, seen=5), 0.0)
    writer.peer_lost(PEER)
    assert writer.next_tick == NEVER


def test_a_request_for_slots_that_is_lost_is_repeated_although_some_of_an_earlier_one_come() -> None:
    writer = borrower()
    writer.want(PEER, Held(wanted=10), 0.0)
    writer.take(TakeLoans(PEER, ((1, 4096), (2, 8192)), 2), Held(wanted=8), 0.0, is_open=True)
    writer.want(PEER, Held(wanted=16, seen=2), 0.1)
    told(writer)
    lend(writer, 3, newest=3)
    writer.take(TakeLoans(PEER, ((3, 12288),), 3), Held(wanted=15), 0.2, is_open=True)
    assert told(writer) == []
    writer.tick(1.2)
    assert told(writer) == [(PEER, Borrow(wanted=15, seen=3))]
    lend(writer, 4, newest=4)
    writer.take(TakeLoans(PEER, ((4, 16384),), 4), Held(), 1.3, is_open=True)
    assert writer.next_tick == NEVER


def test_listed_loans_of_a_writer_without_requests_go_back() -> None:
    writer = borrower()
    lent = TakeLoans(PEER, ((6, 24576), (7, 28672)), 7)
    writer.take(lent, Held(free=(6, 7)), 0.0, is_open=True)
    assert told(writer) == []
    writer.take(lent, Held(free=(7,), forgotten=(6,)), 0.0, is_open=False)
    assert told(writer) == [(PEER, Borrow(wanted=0, seen=7, returned=(6, 7)))]
    writer.take(lent, Held(wanted=2, free=(7,), forgotten=(6,)), 0.0, is_open=True)
    assert told(writer) == [(PEER, Borrow(wanted=2, seen=7, returned=(6,)))]
    writer.tick(1.0)
    assert told(writer) == [(PEER, Borrow(wanted=2, seen=7))]


def test_slots_of_one_request_share_a_message() -> None:
    writer = borrower()
    keys = [RequestKey(bytes([i]) * 16, 0) for i in range(2)]
    for number, key in enumerate((keys[0], keys[1], keys[0])):
        writer.report(PEER, key, 9, Filled(number, 0, (), 0, 64), 0.0)
    messages = [message for _, message in told(writer)]
    assert [[slot.loan for slot in m.slots] for m in messages if isinstance(m, SlotsFilled)] == [[0, 2], [1]]
    assert told(writer) == []


def test_a_writer_without_an_account_is_lent_nothing() -> None:
    pool = Pool(total=12, window=4)
    lender = make(pool, PEER)
    wants(lender, SIBLING, 3)
    assert told(lender) == []
    assert pool.num_free == 12


def test_a_writer_that_connects_anew_while_it_waits_leaves_no_slot_behind() -> None:
    pool = Pool(total=12, window=4)
    lender = make(pool, PEER)
    wants(lender, PEER, 100)
    for generation in (1, 2, 3):
        lender.open(PEER, 7, generation)
        assert pool.num_free + lender.num_lent + lender.num_lost == 12
        wants(lender, PEER, 100)


def test_a_writer_without_requests_takes_back_what_it_has_asked_for() -> None:
    writer = borrower()
    writer.give_back(PEER, Held(), 0.0)
    writer.want(PEER, Held(wanted=5), 0.0)
    writer.give_back(PEER, Held(), 0.0)
    writer.give_back(PEER, Held(free=(3,), seen=3), 0.0)
    writer.give_back(PEER, Held(seen=3), 0.0)
    expected = [Borrow(wanted=5, seen=0), Borrow(wanted=0, seen=0), Borrow(wanted=0, seen=3, returned=(3,))]
    assert told(writer) == [(PEER, message) for message in expected]
    assert writer.next_tick == NEVER


def test_loans_are_listed_again_while_they_are_not_filled() -> None:
    pool = Pool(total=4, window=4)
    lender = make(pool, PEER, SIBLING)
    assert lender.next_tick == NEVER
    wants(lender, PEER, 2)
    loans = listed(lender)[PEER]
    for now, expected in ((0.4, 0), (0.5, 1), (1.0, 0), (1.5, 1), (3.5, 1)):
        lender.tick(now)
        assert len(told(lender)) == expected, now
    lender.on_filled(PEER, filled(loans[0][0]), lambda: None)
    assert listed(lender) == {PEER: loans[1:]}
    wants(lender, PEER, 0, seen=loans[1][0], returned=[loans[1][0]])
    lender.tick(100.0)
    assert told(lender) == []
    assert lender.next_tick == NEVER


def test_the_end_of_a_connection_leaves_the_loans_of_a_later_one() -> None:
    """Both sides give a connection up at once: the peer's hello of the next one may be taken before the loss of the last."""
    pool = Pool(total=8, window=4)
    lender = make(pool, PEER)
    wants(lender, PEER, 2)
    terms = lender.open(PEER, 7, 1)
    lender.peer_lost(PEER, 7, 0)
    assert lender.open(PEER, 7, 1) == terms
    wants(lender, PEER, 1)
    lender.peer_lost(PEER, 7, 2)
    assert (pool.num_free, lender.num_lost, lender.num_lent) == (5, 3, 0)


def test_slots_of_an_instance_that_is_forgotten_are_lost() -> None:
    pool = Pool(total=4, window=4)
    lender = make(pool, PEER, SIBLING, PeerRank("prefill-1", 0))
    wants(lender, PEER, 1)
    wants(lender, PeerRank("prefill-1", 0), 1)
    lender.forget("prefill-0")
    assert (pool.num_free, lender.num_lost, lender.num_lent) == (2, 1, 1)


@pytest.mark.parametrize("spare", [0, 100])
def test_slots_lent_to_an_earlier_connection_come_back_from_the_same_process(spare: int) -> None:
    """Nothing proves a process of another host quiet while it lives."""
    pool = Pool(total=4, window=4, spare=spare)
    lender = make(pool, PEER)
    for generation in range(1, 6):
        wants(lender, PEER, 4)
        assert len(listed(lender)[PEER]) > 0
        free = pool.num_free
        lender.peer_lost(PEER, 7, generation - 1)
        assert (pool.num_free == 4) is (spare > 0)
        assert pool.num_free >= free
        lender.open(PEER, 7, generation)
        earlier = listed(lender)[PEER]
        lender.tick(10.0)
        assert listed(lender)[PEER] == earlier, "again, until they are returned"
        wants(lender, PEER, 0, returned=[number for number, _ in earlier])
        assert (pool.num_free, lender.num_lost, lender.problem) == (4, 0, "")
        assert not lender._lost, "nothing is kept of a process that has returned all"
        assert pool.spare == spare
        lender.tick(100.0)
        assert told(lender) == []


def test_another_process_returns_no_slots_of_the_last_one() -> None:
    pool = Pool(total=4, window=4)
    lender = make(pool, PEER)
    wants(lender, PEER, 4)
    earlier = [number for number, _ in listed(lender)[PEER]]
    lender.peer_lost(PEER, 7, 0)
    lender.open(PEER, 8, 0)
    assert listed(lender) == {}
    wants(lender, PEER, 0, returned=earlier)
    assert lender.num_lost == len(earlier)
    lender.peer_quiet(PEER, 7)
    assert (pool.num_free, lender.num_lost) == (4, 0)
