"""Simulated transfers through lent slots: faults of messages, losses, and broken versions of the loans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from disagg.protocol.loans import Account, Borrower, Lender
from disagg.protocol.messages import Filled
from disagg.protocol.sending import Sends
from disagg.protocol.types import PeerRank
from disagg.transfer.staging import Loans
from harness.simulator.faults import Behaviour, FixedFaults, TransferResult
from harness.simulator.model import Violation
from harness.simulator.scenario import Loss, Piece, Script
from tests.protocol.test_simulator import CHUNKS, D0, MESSAGE_FAULTS, P0, outcomes, run, run_schedules

PACKED = frozenset(range(8))
LONG = Script(prompt=8, pieces=(Piece(0.0, (0, 8)), Piece(0.3, state=True)), finish_after_s=0.6)
"""Its first transfer takes more slots than one writer may hold."""


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_packed_transfers_succeed(ranks: tuple[int, int]) -> None:
    simulation = run(LONG, FixedFaults(packed_transfers=PACKED), num_senders=ranks[0], num_receivers=ranks[1])
    assert set(outcomes(simulation).values()) == {True}
    used = [use for host in simulation.hosts.values() for use in host.slots.memory.values()]
    assert used, "the slots were written"


@pytest.mark.parametrize("fault", MESSAGE_FAULTS)
def test_each_message_of_a_packed_transfer_with_a_fault(fault: str) -> None:
    for index in range(run(LONG, FixedFaults(packed_transfers=PACKED)).num_messages + 2):
        faults = FixedFaults({index: MESSAGE_FAULTS[fault]}, packed_transfers=PACKED)
        assert outcomes(run(LONG, faults)) == {"P0": True, "D0": True}


@pytest.mark.parametrize("result", TransferResult)
@pytest.mark.parametrize("abort", ["neither", "decode", "prefill"])
def test_packed_transfers_with_each_result(result: TransferResult, abort: str) -> None:
    when = {0: 0.35}
    script = Script(
        pieces=CHUNKS,
        finish_after_s=0.6,
        receive_aborts=when if abort == "decode" else {},
        send_aborts=when if abort == "prefill" else {},
    )
    for index in range(3):
        faults = FixedFaults(transfers={index: Behaviour(result, 0.2, 9.0, "cancelled")}, packed_transfers=PACKED)
        assert set(outcomes(run(script, faults)).values()) == {result is TransferResult.DONE and abort == "neither"}


@pytest.mark.parametrize("at", [0.05, 0.105, 0.1115, 0.3])
@pytest.mark.parametrize("rank", [P0, D0], ids=str)
@pytest.mark.parametrize("other", [None, "other"])
def test_a_loss_during_packed_transfers(at: float, rank: PeerRank, other: str | None) -> None:
    partner = {P0: D0, D0: P0}[rank]
    for notice_s in ((0.0, 0.0), (0.0, 0.5), (0.7, 0.001)):
        loss = Loss(at, rank, partner if other else None, notice_s=notice_s)
        run((LONG, Script(reserve_at=2.0, send_at=2.0)), FixedFaults(packed_transfers=PACKED), losses=(loss,))


# ---------------------------------------------------------------------------------------------- loans broken on purpose


def free_before_unpacking(patch: pytest.MonkeyPatch) -> None:
    on_filled = Lender.on_filled

    def broken(self: Lender, peer: PeerRank, filled: Filled, begin: Callable[[], Any]) -> None:
        account = self._accounts.get(peer)
        address = account.unfilled.get(filled.loan) if account is not None else None
        on_filled(self, peer, filled, begin)
        if address is not None and self._slots is not None:
            self._slots.give_back(address)

    patch.setattr(Lender, "on_filled", broken)


def free_at_a_loss(patch: pytest.MonkeyPatch) -> None:
    retire = Lender._retire

    def broken(self: Lender, account: Account) -> None:
        assert self._slots is not None
        for address in account.unfilled.values():
            self._slots.give_back(address)
        account.unfilled.clear()
        retire(self, account)

    patch.setattr(Lender, "_retire", broken)


def take_every_listed_loan(patch: pytest.MonkeyPatch) -> None:
    listed = Loans.listed

    def broken(self: Loans, loans: Sequence[tuple[int, int]], newest: int) -> tuple[int, ...]:
        found = listed(self, loans, newest)
        self._free.update(loans)
        return found

    patch.setattr(Loans, "listed", broken)


def no_lists_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lender, "tick", lambda _self, _now: None)


def keep_loans_without_a_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sends, "has_open", lambda _self, _peer: True)


def no_reports_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Borrower, "tick", lambda _self, _now: None)


@pytest.mark.parametrize(
    ("mutation", "violation"),
    [
        (free_before_unpacking, "not lent to it any more|overwritten before it was unpacked|slots:"),
        (free_at_a_loss, "not lent to it any more|overwritten before it was unpacked"),
        (take_every_listed_loan, "not lent to it any more|overwritten before it was unpacked|without"),
        (no_lists_again, "slots free"),
        (keep_loans_without_a_request, "slots free"),
        (no_reports_again, "still reports filled slots|after its deadline|never reported|quarantine"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_loans_are_caught(
    mutation: Callable[[pytest.MonkeyPatch], None], violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(Violation, match=violation):
        run_schedules(6000)
