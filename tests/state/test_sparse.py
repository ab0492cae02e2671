"""Sparse attention: index keys and scales that share a page, pooled keys, their open pool, compressed KV by kind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from disagg.core.errors import ConfigError, LayoutError
from disagg.core.topology import Topology
from disagg.layout.election import elect
from disagg.state import sparse
from disagg.testing.reference import Context
from disagg.testing.reference_states import Form
from tests.support.instances import InstanceSpec
from tests.support.kinds import Kind, compressed_kind, gqa_kind, index_kind, mla_kind
from tests.support.states import Scene, check_every_row, moved, runs_by_writer, tp_pairs


def one_page(page_size: int, *, rows: int = 40, gap: int = 0) -> Form:
    return Form(num_rows=rows, page_size=page_size, one_page=True, gap=gap)


def tail(size: int, rows: int = 4) -> Form:
    return Form(num_rows=rows, page_size=size, one_page=True, ring=True)


# ------------------------------------------------------------------------------------------------------------- index keys


@pytest.mark.sweep
def test_every_tp_to_every_tp_fills_every_copy() -> None:
    for ours, theirs in tp_pairs():
        moved(index_kind(), ours, theirs)
        moved(index_kind(granule=2, form=one_page(6)), ours, theirs, 15)


@pytest.mark.parametrize(("source", "destination"), list(itertools.product((1, 4, 6, 16), repeat=2)))
@pytest.mark.parametrize("gap", [0, 5])
def test_keys_and_then_their_scales_in_one_page(source: int, destination: int, gap: int) -> None:
    """`B` keys of 128 bytes, then `B` scales of 4, so the scales start elsewhere with another page size."""
    kind = index_kind(key_nbytes=128, scale_nbytes=4)
    scene = Scene(
        [kind],
        InstanceSpec(forms={"index": one_page(source)}),
        InstanceSpec(tp=2, forms={"index": one_page(destination, gap=gap)}),
    )
    for num_tokens, prefix in ((1, 0), (15, 0), (16, 9), (17, 16), (33, 33)):
        moves = scene.transfer(num_tokens, prefix=prefix)
        assert sum(move.copies.total_nbytes for move in moves) == (num_tokens - prefix) * 132 * 2 * 2


@pytest.mark.parametrize("num_tokens", [64 * k + extra for k in (1, 2) for extra in (-1, 0, 1)])
@pytest.mark.parametrize("sampled", [0, 1])
def test_page_64_at_lengths_around_its_multiples(num_tokens: int, sampled: int) -> None:
    """Case 18: prefill lists a page for the token just sampled, and decode has allocated more pages."""
    kinds = [mla_kind(form=Form(num_rows=9, page_size=64)), index_kind(form=one_page(64))]
    scene = Scene(kinds, InstanceSpec(tp=2), InstanceSpec(tp=4))
    held = dict.fromkeys(("mla", "index"), (0, num_tokens + sampled))
    request = scene.open(num_tokens, held=held, ahead=100)
    check_every_row(scene, request)
    scene.run(request, scene.moves(request))
    assert scene.difference(request) is None


def test_78_main_layers_and_21_index_layers() -> None:
    """Case 21: each component pairs its own layers by id, with any stages."""
    index_layers = (*range(3), *range(6, 78, 4))
    assert len(index_layers) == 21
    kinds = [mla_kind(dim=2, layers=range(78)), index_kind(key_nbytes=2, scale_nbytes=1, layers=index_layers)]
    scene = Scene(kinds, InstanceSpec(tp=2, edges=(0, 20, 78)), InstanceSpec(edges=(0, 40, 61, 78), descending=True))
    runs = runs_by_writer(scene, scene.transfer(5))
    assert sum(runs.values()) == 99
    assert abs(runs[0] - runs[1]) <= 1
    assert abs(runs[2] - runs[3]) <= 1


def test_layers_that_use_anothers_top_k_have_no_rows() -> None:
    """A stage with only such layers has no pool of index keys."""
    kinds = [mla_kind(layers=range(6)), index_kind(layers=(0, 4))]
    for edges in ((0, 1, 4, 6), (0, 2, 4, 6)):
        scene = Scene(kinds, InstanceSpec(tp=2, edges=edges), InstanceSpec(edges=(0, 3, 6)))
        assert any(not rank.memory["index"].buffers for rank in scene.source.ranks)
        scene.transfer(9)


def test_minimax_index_keys_have_no_scales() -> None:
    """One set per rank, in some layers, beside K and V by head."""
    kinds = [gqa_kind(num_kv_heads=4, layers=range(4)), index_kind(key_nbytes=16, scale_nbytes=0, layers=(1, 2))]
    for tp in ((1, 4), (8, 2), (3, 5)):
        moved(kinds, InstanceSpec(tp=tp[0], edges=(0, 1, 4)), InstanceSpec(tp=tp[1], forms={"index": one_page(6)}), 17)


@pytest.mark.parametrize("context", [Context.PAGE_BLOCKS, Context.PAGES_IN_TURN])
def test_pages_of_pooled_keys_under_context_parallelism(context: Context) -> None:
    kind = index_kind(granule=2, form=one_page(4))
    for num_tokens in (1, 4, 17, 31):
        moved(kind, InstanceSpec(cp=3, context=context), InstanceSpec(tp=2), num_tokens)
        moved(kind, InstanceSpec(tp=2), InstanceSpec(cp=2, context=context), num_tokens)


# ------------------------------------------------------------------------------------------------- pooled keys, open pools


@pytest.mark.parametrize("granule", [2, 4, 8])
@pytest.mark.parametrize(("source", "destination"), [(8, 8), (8, 16), (24, 8)])
def test_pooled_keys_move_once_their_last_token_exists(granule: int, source: int, destination: int) -> None:
    """A page has `B/pool` keys, then as many scales. An open pool has no key yet."""
    kind = index_kind(granule=granule)
    scene = Scene(
        [kind], InstanceSpec(tp=2, forms={"index": one_page(source)}), InstanceSpec(forms={"index": one_page(destination)})
    )
    for num_tokens in range(1, 30):
        moves = scene.transfer(num_tokens)
        assert sum(move.copies.total_nbytes for move in moves) == num_tokens // granule * 8 * 2


def test_a_prefix_that_ends_inside_a_pool_needs_that_pools_key() -> None:
    """With a prefix of 6 tokens and pools of 4, decode needs the key of tokens 4 to 7, not that of 0 to 3."""
    scene = Scene([index_kind(granule=4, form=one_page(8))], InstanceSpec(), InstanceSpec())
    for num_tokens, prefix in itertools.product((7, 8, 11, 12), range(7)):
        moves = scene.transfer(num_tokens, prefix=prefix)
        wanted = sum(prefix <= 4 * key + 3 < num_tokens for key in range(3))
        assert sum(move.copies.total_nbytes for move in moves) == wanted * 8 * 2


@pytest.mark.parametrize("pool", [4, 6])
@pytest.mark.parametrize(("source", "destination"), [(6, 6), (6, 8), (8, 6), (11, 7)])
def test_open_pools_of_other_tails(pool: int, source: int, destination: int) -> None:
    """The `n = len % pool` open tokens start at `(len - n) % tail` and wrap. A ring has keys, then scales. 0 move nothing."""
    kind = index_kind(name="index_tail", form=tail(source))
    scene = Scene([kind], InstanceSpec(tp=2), InstanceSpec(tp=3, forms={"index_tail": tail(destination)}))
    for num_tokens in range(1, 40):
        need = (num_tokens - num_tokens % pool, num_tokens)
        assert sparse.open_pool(num_tokens, pool) == need
        moves = scene.transfer(num_tokens, needs={"index_tail": need})
        assert sum(move.copies.total_nbytes for move in moves) == num_tokens % pool * 8 * 2 * 3


def test_pooled_keys_and_the_open_pool_cover_every_token() -> None:
    kinds = [index_kind(granule=4, form=one_page(8)), index_kind(name="index_tail", form=tail(5))]
    scene = Scene(kinds, InstanceSpec(tp=2), InstanceSpec(forms={"index_tail": tail(7), "index": one_page(16)}))
    for num_tokens in range(1, 26):
        scene.transfer(num_tokens, needs={"index_tail": (num_tokens // 4 * 4, num_tokens)})


# ------------------------------------------------------------------------------------------------------------- compressed


def deepseek_v4() -> list[Kind]:
    """Compressed KV of ratio 4 and 128, index keys of ratio 4 and a window of raw latents, each in some layers."""
    return [
        compressed_kind(ratio=4, name="kv_4", layers=(0, 2, 4), form=Form(num_rows=20, page_size=64)),
        compressed_kind(ratio=128, name="kv_128", layers=(1, 3), form=Form(num_rows=9, page_size=256)),
        index_kind(granule=4, layers=(0, 2, 4), form=one_page(64)),
        mla_kind(name="window", layers=range(5), window=8, form=Form(num_rows=20, page_size=16)),
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 259])
@pytest.mark.parametrize("edges", [(0, 9), (0, 2, 9), (0, 1, 2, 9)])
def test_compressed_kv_is_grouped_by_kind(num_tokens: int, edges: tuple[int, ...]) -> None:
    other = {"kv_4": Form(num_rows=40, page_size=16), "kv_128": Form(num_rows=9, page_size=128), "index": one_page(32)}
    moved(deepseek_v4(), InstanceSpec(tp=2, edges=edges), InstanceSpec(forms=other), num_tokens)
    moved(deepseek_v4(), InstanceSpec(forms=other), InstanceSpec(tp=4, edges=edges), num_tokens, prefix=num_tokens // 2)


def test_ratio_tokens_have_one_entry() -> None:
    scene = Scene(deepseek_v4(), InstanceSpec(), InstanceSpec())
    nbytes = {move.component: move.copies.total_nbytes for move in scene.transfer(259)}
    assert nbytes == {"kv_4": 64 * 3 * 2 * 3, "kv_128": 2 * 3 * 2 * 2, "index": 64 * 8 * 3, "window": 8 * 5 * 2 * 5}


def test_different_ratios_are_rejected() -> None:
    ours = Scene([compressed_kind(ratio=4, name="kv_c")], InstanceSpec(), InstanceSpec())
    theirs = Scene([compressed_kind(ratio=8, name="kv_c")], InstanceSpec(), InstanceSpec())
    with pytest.raises(LayoutError, match=r"'kv_c', tensor 'latent', axis 'token': granule: 4 here, 8 at the peer"):
        elect(ours.source.table, theirs.destination.table)


# ----------------------------------------------------------------------------------------------------------- declarations


def test_pages_may_be_larger_than_their_keys_and_scales() -> None:
    pages = {0: np.zeros((3, 50), np.uint8)}
    found = sparse.index_keys(pages, page_size=4, topology=Topology(), key_nbytes=6, scale_nbytes=2)
    assert found.placement is not None
    assert found.placement.tensor("scale").bases[0] - found.placement.tensor("key").bases[0] == 24
    assert {tensor.row_stride for tensor in found.placement.tensors} == {50}


def test_pages_of_wider_elements_are_taken_as_bytes() -> None:
    pages = {0: np.zeros((3, 8), np.float32)}
    found = sparse.index_keys(pages, page_size=4, topology=Topology(), key_nbytes=6, scale_nbytes=2)
    assert found.placement is not None
    assert found.placement.tensor("key").row_stride == 32
    assert found.layouts[0] is not None
    assert [tensor.dtype for tensor in found.layouts[0].tensors] == ["uint8", "uint8"]


@pytest.mark.parametrize("shape", [(3, 31), (3,), (3, 4, 8)])
def test_pages_too_small_for_their_keys_and_scales_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'key', layer 4: index pages: expected \[page, at least 32 bytes\], found shape"):
        sparse.index_keys({4: np.zeros(shape, np.uint8)}, page_size=4, topology=Topology(), key_nbytes=6, scale_nbytes=2)


def test_a_key_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor 'key', granule: expected an integer of at least 1, found 0"):
        sparse.index_keys({0: np.zeros((3, 32), np.uint8)}, page_size=4, topology=Topology(), tokens_per_key=0)


def test_index_pages_with_gaps_are_refused() -> None:
    """Every second byte belongs to somebody else."""
    pages = {0: np.zeros((4, 64, 2), np.uint8)[:, :, 0]}
    expected = r"expected consecutive bytes in a page, found strides \(128, 2\)"
    with pytest.raises(ConfigError, match=expected):
        sparse.index_keys(pages, page_size=4, topology=Topology(), key_nbytes=6, scale_nbytes=2)
    with pytest.raises(ConfigError, match=expected):
        sparse.index_tail(pages, tail=4, topology=Topology(), key_nbytes=6, scale_nbytes=2)


def test_index_pages_that_end_within_the_tokens_of_a_key_are_refused() -> None:
    pages = {0: np.zeros((4, 64), np.uint8)}
    with pytest.raises(ConfigError, match="expected a page_size that is a multiple of 6, found 16"):
        sparse.index_keys(pages, page_size=16, topology=Topology(), key_nbytes=6, scale_nbytes=2, tokens_per_key=6)
