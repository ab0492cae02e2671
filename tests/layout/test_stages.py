"""Pipeline stages that each describe their own layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from disagg import ConfigError, KVManager, ModelId, Topology
from disagg.layout.agreement import LocalRank
from disagg.layout.placement import Component
from disagg.layout.stages import group_layers, join_stages
from disagg.state import mamba, paged


def test_stages_default_to_this_ranks_layers() -> None:
    assert group_layers(Topology(tp=4), [3, 1], None, what="kv") == ((3, 1),)
    assert group_layers(Topology(pp=3, pp_rank=1), [3, 1], None, what="kv") == ((), (3, 1), ())
    stages = [[0, 1], [5, 4]]
    assert group_layers(Topology(pp=2, pp_rank=1), (5, 4), stages, what="kv") == ((0, 1), (5, 4))
    assert stages == [[0, 1], [5, 4]]


@pytest.mark.parametrize(
    ("topology", "own", "stages", "message"),
    [
        (Topology(pp=2), [0], [[0], [1], [2]], "expected 2 stages .*, found 3"),
        (Topology(), [0], [[0], [1]], "expected 1 stages .*, found 2"),
        (Topology(pp=2), [0], [[0], [0]], "a layer in two stages"),
        (Topology(pp=2), [0], [[0], ["1"]], r"expected layer ids of 0 to 2\*\*31 - 1, found '1'"),
        (Topology(pp=2), [0, 0], [[0, 0], [1]], r"a layer twice in stage 0: \(0, 0\)"),
        (Topology(pp=2, pp_rank=1), [0], [[0], [1]], r"tensors of layers \(1,\) on stage 1 .*, found tensors of \(0,\)"),
        (Topology(pp=2), [1, 0], [[0, 1], [2]], "found tensors of"),
    ],
)
def test_stages_that_do_not_fit_are_rejected(topology: Topology, own: list[int], stages: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        group_layers(topology, own, stages, what="component 'kv'")


class Stages:
    """One thread for each pipeline stage, and a `gather` like `all_gather_object`."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._barrier = Barrier(topology.pp, timeout=20)
        self._given: list[Any] = [None] * topology.pp

    def join(self, describe: Callable[[Topology], Sequence[Component]]) -> list[list[Component] | Exception]:
        """What each stage gets, or the error that it gets."""
        ranks = [replace(self.topology, pp_rank=stage) for stage in range(self.topology.pp)]
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(lambda rank: self._join(rank, describe), ranks))

    def _join(self, rank: Topology, describe: Callable[[Topology], Sequence[Component]]) -> list[Component] | Exception:
        def gather(own: Any) -> list[Any]:
            self._given[rank.pp_rank] = own
            self._barrier.wait()
            return list(self._given)

        try:
            return join_stages(lambda: describe(rank), topology=rank, gather=gather)
        except (ConfigError, OSError) as error:
            return error


ROLES = mamba.gdn_roles(
    num_key_heads=4, num_value_heads=8, key_head_dim=2, value_head_dim=3, kernel=4, dtypes=("float16", "float32")
)
KV_LAYERS: Sequence[Sequence[int]] = ((0, 3), (), (7,))
SLOT_LAYERS: Sequence[Sequence[int]] = ((1, 2), (4, 5, 6), ())
TOPOLOGY = Topology(pp=3, tp=2, tp_rank=1)


def hybrid(rank: Topology, *, whole: bool) -> list[Component]:
    """KV on the stages 0 and 2, recurrent state on 0 and 1. With `whole` the lists of all stages are given."""
    found = []
    if layers := KV_LAYERS[rank.pp_rank]:
        tensors = {layer: (np.zeros((5, 16, 2, 8)), np.zeros((5, 16, 2, 8))) for layer in layers}
        found.append(
            paged.gqa(tensors, axes="nhd", num_kv_heads=4, topology=rank, layers_by_stage=KV_LAYERS if whole else None)
        )
    if layers := SLOT_LAYERS[rank.pp_rank]:
        states = {
            role.name: {layer: np.zeros(role.local_shape(rank, rows=6, page_size=1), role.dtype) for layer in layers}
            for role in ROLES
        }
        found.append(mamba.recurrent(ROLES, states, topology=rank, layers_by_stage=SLOT_LAYERS if whole else None))
    return found


def test_stages_that_describe_themselves_have_the_table_of_stages_that_know_all() -> None:
    joined = Stages(TOPOLOGY).join(lambda rank: hybrid(rank, whole=False))
    expected = {part.name: part.layouts for stage in (0, 1) for part in hybrid(replace(TOPOLOGY, pp_rank=stage), whole=True)}
    for stage, found in enumerate(joined):
        assert isinstance(found, list), found
        assert [part.name for part in found] == ["kv", "ssm"]
        assert {part.name: part.layouts for part in found} == expected
        rank = replace(TOPOLOGY, pp_rank=stage)
        assert LocalRank.of(rank, found).placements.keys() == {part.name for part in hybrid(rank, whole=False)}


def test_a_stage_that_fails_ends_the_others() -> None:
    def describe(rank: Topology) -> list[Component]:
        if rank.pp_rank == 1:
            raise OSError("no memory is left")
        return hybrid(rank, whole=False)

    first, second, third = Stages(TOPOLOGY).join(describe)
    assert isinstance(second, OSError)
    for other in (first, third):
        assert str(other) == "pipeline stage 1 could not describe its layers: OSError: no memory is left"


def test_two_components_of_one_name_are_refused() -> None:
    for found in Stages(Topology(pp=2)).join(lambda rank: latents(rank) * 2):
        assert "expected each component once, found ['mla', 'mla']" in str(found)


def latents(rank: Topology) -> list[Component]:
    return [paged.mla({3: np.zeros((5, 16, 6))}, dim=6, topology=rank)]


def test_a_layer_on_two_stages_is_refused() -> None:
    for found in Stages(Topology(pp=2)).join(latents):
        assert str(found) == "component 'mla': expected each layer on one pipeline stage, found [3, 3]"


@pytest.mark.parametrize(
    ("stages", "message"),
    [([{}, {}, {}], "expected what each of 2 pipeline stages gives, found 3"), ([{}, {"mla": ()}], "to describe 2 ranks")],
)
def test_what_gather_returns_is_checked(stages: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        join_stages(list, topology=Topology(pp=2), gather=lambda _: stages)


def test_a_manager_refuses_one_stages_part() -> None:
    topology = Topology(pp=2, pp_rank=1)
    with pytest.raises(ConfigError, match=r"expected layers_by_stage, .* found stage 1 only"):
        KVManager(
            name="decode-0",
            topology=topology,
            components=latents(topology),
            model=ModelId("m"),
            backend="local",
            leader="tcp://127.0.0.1:1",
        )
