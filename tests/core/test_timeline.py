"""The phases of a request follow each other and add up to its whole time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg.core.timeline import PHASES, Moments, Timeline, TransferPhases


def moments(*, landed: float = 0.0, transfer: Sequence[float] = (), **later: float) -> Moments:
    """Those of a request that was opened at 10 s."""
    made = Moments()
    made.opened_at = 10.0
    for name, at in later.items():
        setattr(made, name, at)
    if landed:
        made.land(landed, TransferPhases(*transfer))
    return made


def phases(made: Moments) -> list[float]:
    return [round(each, 6) for each in made.timeline().phases.values()]


def test_a_request_that_landed_is_divided_into_its_phases() -> None:
    made = moments(landed=12.0, transfer=(0.1, 0.2, 0.3, 0.4), unpacked_at=12.5, ended_at=12.6, taken_at=13.0)
    assert phases(made) == [1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.1, 0.4]
    timeline = made.timeline()
    assert tuple(timeline.phases) == PHASES
    assert timeline.total_s == pytest.approx(3.0)


def test_the_transfer_that_is_noted_last_counts() -> None:
    made = moments(landed=11.0, transfer=(0.0, 0.0, 0.0, 1.0), ended_at=14.0)
    made.land(13.0, TransferPhases(wire_s=2.0))
    assert phases(made) == [1.0, 0, 0, 0, 2.0, 0, 1.0, 0]


def test_a_request_that_never_landed_has_only_waited() -> None:
    assert phases(moments(ended_at=14.0)) == [4.0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("transfer", [(3600.0, 0.0, 0.0, 3600.0), (0.0, 0.0, 0.0, 9.0)])
def test_figures_of_a_peer_are_cut_to_the_time_that_there_was(transfer: Sequence[float]) -> None:
    made = moments(landed=12.0, transfer=transfer, ended_at=12.0)
    assert made.timeline().total_s == pytest.approx(2.0)
    assert made.timeline().wait_s == pytest.approx(0.0)


def test_figures_that_a_peer_leaves_out_count_as_waiting() -> None:
    assert phases(moments(landed=12.0, transfer=(0.5,), ended_at=12.0)) == [1.5, 0.5, 0, 0, 0, 0, 0, 0]


def test_bytes_and_pieces_of_all_transfers_add_up() -> None:
    made = moments(landed=11.0)
    made.land(12.0, TransferPhases(), nbytes=64, pieces=2)
    made.land(13.0, TransferPhases(), nbytes=32, pieces=1)
    assert (made.nbytes, made.pieces) == (96, 3)


def test_every_phase_is_a_field() -> None:
    assert {"opened_at", *(f"{phase}_s" for phase in PHASES)} == set(Timeline.__struct_fields__)
    assert list(TransferPhases(1.0, 2.0, 3.0, 4.0).phases.items()) == [
        ("bind", 1.0),
        ("pack", 2.0),
        ("post", 3.0),
        ("wire", 4.0),
    ]


def test_a_request_under_way_has_waited_until_now() -> None:
    made = Moments()
    first = made.timeline()
    assert first.wait_s >= 0
    assert made.timeline().total_s >= first.total_s


def test_the_server_takes_an_event_once() -> None:
    made = moments(ended_at=11.0)
    made.take()
    first = made.taken_at
    made.take()
    assert made.taken_at == first > 0
