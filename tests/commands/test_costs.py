"""Costs of a NIC, checked against published sweeps; costs of a file; costs fitted to measured speeds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from disagg.commands.cases.costs import ALWAYS, Costs, Measured, Terms, fitted_costs, fitted_phases, link_costs, read_costs
from disagg.core.errors import ConfigError
from disagg.core.timeline import PHASES

MIB, NBYTES = 1 << 20, 64 << 30
PUBLISHED = {
    "NIXL, two 100G NICs": ("2x100gbit", MIB, 24.4),
    "NIXL, one 400G NIC": ("400gbit", MIB, 316 / 8),
    "fabric-lib, one GPU": ("400gbit", MIB, 400 / 8),
    "Mooncake over EFA, p6-b300, 1 MB": ("16x400gbit", MIB, 780),
    "Mooncake over EFA, p5en, 1 MB": ("16x200gbit", MIB, 366),
    "SGLang, Qwen3-235B": ("4x400gbit", MIB, 164),
}
"""Published GB/s for pieces of a size over NICs (`docs/rdma.md` has the sources, and the points that the model misses)."""


@pytest.mark.parametrize("point", PUBLISHED)
def test_the_model_of_a_nic_is_within_25_percent_of_what_was_published(point: str) -> None:
    link, piece, published = PUBLISHED[point]
    predicted = NBYTES / link_costs(link).direct_s(NBYTES, NBYTES // piece) / 1e9
    assert predicted == pytest.approx(published, rel=0.25)


def test_short_pieces_are_limited_by_messages_and_long_ones_by_the_rate() -> None:
    costs = link_costs("400gbit")
    assert costs.direct_s(512_000, 1000) == pytest.approx(1000 * costs.piece_s)
    assert costs.direct_s(1 << 30, 1) == pytest.approx((1 << 30) / (0.95 * 50e9))
    assert link_costs("2x200gbit") == msgspec.structs.replace(costs, num_nics=2)


@pytest.mark.parametrize("link", ["400", "gbit", "0gbit", "x400gbit", "400gbit ", "-1gbit"])
def test_an_invalid_link_is_named(link: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a rate such as 400gbit or 8x400gbit"):
        link_costs(link)


def test_costs_are_read_from_a_file(tmp_path: Path) -> None:
    file, costs = tmp_path / "costs.json", Costs(2e-6, 11.0, 7.0)
    file.write_bytes(msgspec.json.encode(costs))
    assert read_costs(file) == costs
    for wrong in (b"", b"[]", b'{"gbps": 1}', b'{"piece_s": 0, "gbps": 0, "packed_gbps": 1}'):
        file.write_bytes(wrong)
        with pytest.raises(ConfigError, match="costs"):
            read_costs(file)


def test_the_fit_finds_the_costs_that_made_the_speeds() -> None:
    costs = Costs(3e-6, 8.0, 5.0)
    sizes = [512 << i for i in range(10)]
    found = fitted_costs([(size, size / costs.direct_s(size, 1) / 1e9, costs.packed_gbps) for size in sizes])
    assert found.piece_s == pytest.approx(costs.piece_s)
    assert found.gbps == pytest.approx(costs.gbps)
    assert found.packed_gbps == costs.packed_gbps


def test_speeds_that_no_costs_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="two piece sizes"):
        fitted_costs([(512, 1.0, 1.0)])
    found = r"grow with its size, found 0\.512 us for 512 bytes, 0\.128 us for 1024 bytes; measure longer"
    with pytest.raises(ConfigError, match=found):
        fitted_costs([(1024, 8.0, 1.0), (512, 1.0, 1.0)])


def test_where_longer_pieces_are_not_faster_a_piece_costs_nothing() -> None:
    found = fitted_costs([(512, 8.0, 5.0), (1024, 4.0, 5.0)])
    assert found.piece_s == 0.0
    assert 4.0 < found.gbps < 8.0


@pytest.mark.parametrize(
    ("costs", "below"),
    [
        (Costs(1e-6, 10.0, 5.0), 10_000),  # 1 us is what 10,000 bytes take longer packed
        (Costs(1e-6, 5.0, 10.0), ALWAYS),
        (Costs(1e-6, 5.0, 5.0), ALWAYS),
        (Costs(0.0, 5.0, 5.0), 0),
        (Costs(0.7e-6, 50.0, 50.0, overlaps=True), 35_000),  # a NIC sends that much while the next piece is posted
        (Costs(0.7e-6, 50.0, 60.0, overlaps=True), ALWAYS),
    ],
)
def test_pieces_are_packed_where_that_is_faster(costs: Costs, below: int) -> None:
    assert costs.break_even_nbytes == pytest.approx(below, abs=1)
    for nbytes in (below // 2, below * 2):
        if 0 < nbytes < ALWAYS // 2:
            assert (costs.packed_s(nbytes) < costs.direct_s(nbytes, 1)) is (nbytes < below)


TERMS: dict[str, dict[str, Terms]] = {
    "direct": {"wait": (3e-4, 0.0, 0.0), "bind": (1e-5, 2e-8, 0.0), "post": (0.0, 3e-6, 1e-11), "wire": (1e-4, 0.0, 2e-10)},
    "packed": {"wait": (2e-4, 0.0, 0.0), "pack": (0.0, 1e-8, 2e-10), "unpack": (1e-5, 2e-8, 0.0), "handover": (1e-4, 0.0, 0.0)},
}


def test_the_fit_finds_the_terms_that_made_the_phases() -> None:
    made = Costs(1e-6, 5.0, 5.0, phases=TERMS)
    sizes = [(path, nbytes // piece, nbytes) for path in TERMS for nbytes in (1 << 20, 1 << 23) for piece in (512, 4096, 65536)]
    measured = []
    for path, pieces, nbytes in sizes:
        shares = {path: (pieces, nbytes)}
        measured.append(Measured(path, pieces, nbytes, made.phases_s(shares, shares, one_link=False)))
    found = fitted_phases(measured)
    for path, phases in TERMS.items():
        for phase in PHASES:
            assert found[path][phase] == pytest.approx(phases.get(phase, (0.0, 0.0, 0.0)), rel=1e-6, abs=1e-15)


def test_no_term_is_negative_whatever_was_measured() -> None:
    falling = [Measured("direct", n, 1 << 20, dict.fromkeys(PHASES, 1.0 / n)) for n in (1, 10, 100)]
    assert all(term >= 0 for terms in fitted_phases(falling)["direct"].values() for term in terms)


def test_phases_of_both_paths_add_up_but_for_what_is_spent_once() -> None:
    costs = Costs(1e-6, 5.0, 5.0, phases=TERMS)
    both = costs.phases_s({"direct": (10, 1000), "packed": (100, 5000)}, {"packed": (200, 9000)}, one_link=False)
    assert both["wait"] == pytest.approx(3e-4)
    assert both["post"] == pytest.approx(10 * 3e-6 + 1000 * 1e-11)
    assert both["pack"] == pytest.approx(100 * 1e-8 + 5000 * 2e-10)
    assert both["unpack"] == pytest.approx(1e-5 + 200 * 2e-8)
    assert tuple(both) == PHASES
    assert Costs(1e-6, 5.0, 5.0).phases_s({"direct": (10, 1000)}, {}, one_link=False) == {}


def test_what_several_ranks_send_to_one_passes_one_link() -> None:
    costs = Costs(1e-6, 5.0, 5.0, phases=TERMS)
    sent, received = {"direct": (10, 1000)}, {"direct": (40, 4000)}
    alone, shared = (costs.phases_s(sent, received, one_link=each) for each in (False, True))
    assert shared["wire"] - alone["wire"] == pytest.approx(3000 * (1e-11 + 2e-10))
    assert {**shared, "wire": 0.0} == {**alone, "wire": 0.0}


def test_one_rank_alone_takes_the_sum_of_its_phases_or_the_simple_costs() -> None:
    sent = {"direct": (10, 1000), "packed": (100, 5000)}
    phases = Costs(1e-6, 5.0, 2.0, phases=TERMS)
    assert phases.seconds(sent) == pytest.approx(sum(phases.phases_s(sent, sent, one_link=False).values()))
    assert Costs(1e-6, 5.0, 2.0).seconds(sent) == pytest.approx(1e-5 + 1000 / 5e9 + 5000 / 2e9)


def test_pieces_are_packed_where_the_phases_make_that_faster() -> None:
    costs = Costs(1e-6, 5.0, 5.0, phases={"direct": {"post": (0.0, 3e-6, 2e-10)}, "packed": {"pack": (0.0, 1e-6, 4e-10)}})
    assert costs.break_even_nbytes == pytest.approx(10_000, abs=1)
    sizes = {nbytes: [costs.seconds({path: (100, 100 * nbytes)}) for path in ("direct", "packed")] for nbytes in (9000, 11000)}
    assert sizes[9000][0] > sizes[9000][1]
    assert sizes[11000][0] < sizes[11000][1]
    always = msgspec.structs.replace(costs, phases={"direct": {"post": (0.0, 3e-6, 2e-10)}, "packed": {}})
    never = msgspec.structs.replace(costs, phases={"direct": {}, "packed": {"pack": (0.0, 1e-6, 4e-10)}})
    assert (always.break_even_nbytes, never.break_even_nbytes) == (ALWAYS, 0)
