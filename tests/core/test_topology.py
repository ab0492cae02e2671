"""Topologies: the numbering of ranks, and invalid sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.testing.strategies import topologies


def test_ranks_are_numbered_with_tp_fastest_then_cp_pp_dp() -> None:
    for dp, pp, cp, tp in itertools.product(range(1, 4), repeat=4):
        number = 0
        for dp_rank, pp_rank, cp_rank, tp_rank in itertools.product(range(dp), range(pp), range(cp), range(tp)):
            rank = Topology(dp=dp, pp=pp, cp=cp, tp=tp, dp_rank=dp_rank, pp_rank=pp_rank, cp_rank=cp_rank, tp_rank=tp_rank)
            assert rank.rank == number
            assert rank.group_rank == number % (pp * cp * tp)
            assert Topology(dp=dp, pp=pp, cp=cp, tp=tp).at(number) == rank
            number += 1
        assert Topology(dp=dp, pp=pp, cp=cp, tp=tp).num_ranks == number


@given(topologies())
def test_a_group_is_every_rank_with_the_same_dp_index_in_order(topology: Topology) -> None:
    group = list(topology.group())
    assert len(group) == topology.group_size
    assert [rank.group_rank for rank in group] == list(range(topology.group_size))
    assert {rank.dp_rank for rank in group} == {topology.dp_rank}
    assert topology in group
    assert topology.at(topology.rank) == topology


def test_moe_ranks_follow_from_the_tensor_parallel_rank() -> None:
    for tp in range(1, 9):
        for ep in (divisor for divisor in range(1, tp + 1) if tp % divisor == 0):
            for tp_rank in range(tp):
                rank = Topology(tp=tp, ep=ep, tp_rank=tp_rank)
                moe_tp = tp // ep
                assert (rank.moe_tp, rank.moe_tp_rank, rank.ep_rank) == (moe_tp, tp_rank % moe_tp, tp_rank // moe_tp)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 0}, r"tp: .*at least 1, found 0"),
        ({"pp": 1.5}, r"pp: .*found 1\.5"),
        ({"dp": -1}, r"dp: .*found -1"),
        ({"cp": "2"}, r"cp: .*found '2'"),
        ({"ep": 0}, r"ep: .*found 0"),
        ({"tp": True}, r"tp: .*found True"),
        ({"tp_rank": False}, r"tp_rank: .*found False"),
        ({"tp": 4, "tp_rank": 4}, r"tp_rank: expected 0 to 3 \(tp=4\), found 4"),
        ({"pp": 2, "pp_rank": -1}, r"pp_rank: .*found -1"),
        ({"dp_rank": 0.0}, r"dp_rank: .*found 0\.0"),
        ({"cp": 2, "cp_rank": 2}, r"cp_rank: .*found 2"),
        ({"tp": 6, "ep": 4}, r"ep: expected a divisor of tp=6, found 4"),
    ],
)
def test_impossible_topologies_are_rejected_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(**arguments)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_instance_is_rejected(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"expected 0 to 7, found {rank}"):
        Topology(tp=4, dp=2).at(rank)
