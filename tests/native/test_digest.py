"""The digest of state is independent of the layout, additive, and sensitive to misplaced elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core import _native
from harness.reference_core import digest_numpy

Content = npt.NDArray[np.generic]
DTYPES = ("uint8", "float16", "float32", "float64")
ORDERS = ((0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1))
"""Memory orders of `token, head, dim` inside a page."""


class Held:
    """Content `[layer, token, head, dim]` in pages, in any memory order."""

    def __init__(self, content: Content, *, page_size: int, order: tuple[int, ...], seed: int, layers: list[int]) -> None:
        num_layers, num_tokens, *inner = content.shape
        num_pages = -(-num_tokens // page_size)
        rng = np.random.default_rng(seed)
        self.layers = np.array(layers, dtype=np.int64)
        self.ids = rng.permutation(num_pages + 2)[:num_pages].astype(np.int32)
        shape = [page_size, *inner]
        self.memory = rng.integers(
            0, 256, (num_layers, num_pages + 2, *(shape[i] for i in order), content.itemsize), dtype=np.uint8
        )
        self.view = self.memory.view(content.dtype)[..., 0].transpose(0, 1, *(2 + order.index(i) for i in range(3)))
        for token in range(num_tokens):
            self.view[:, self.ids[token // page_size], token % page_size] = content[:, token]
        self.page_size = page_size

    def digest(
        self,
        *,
        tokens: tuple[int, int],
        heads: tuple[int, int],
        which: slice = slice(None),
        seed: int = 5,
        num_threads: int = 1,
    ) -> int:
        _, row, token, head, dim = self.view.strides
        start = self.view.__array_interface__["data"][0] + heads[0] * head
        bases = np.uint64(start) + np.arange(len(self.layers), dtype=np.uint64) * np.uint64(self.view.strides[0])
        return _native.digest(
            self.layers[which],
            bases[which],
            self.runs(tokens),
            [(heads[1] - heads[0], head, heads[0]), (self.view.shape[4], dim, 0)],
            row_stride=row,
            token_stride=token,
            itemsize=self.view.itemsize,
            seed=seed,
            num_threads=num_threads,
        )

    def runs(self, tokens: tuple[int, int]) -> npt.NDArray[np.int64]:
        everything: dict[str, Any] = {"first_page": 0, "edges": np.array([0, 1]), "period": 1}
        pages = _native.PageList(self.ids, page_size=self.page_size, num_rows=len(self.ids) + 2, **everything)
        globally = _native.PageList(np.zeros(1, np.int32), page_size=2**40, num_rows=1, **everything)
        runs, fault = _native.token_runs(*tokens, 1, pages, globally)
        assert fault is None
        return runs


@st.composite
def contents(draw: st.DrawFn) -> Content:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.sampled_from((1, 3, 16, 40))))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]


@given(contents(), st.data())
def test_the_digest_matches_the_reference_in_any_layout_and_in_parts(content: Content, data: st.DataObject) -> None:
    num_layers, num_tokens, num_heads, dim = content.shape
    layers = data.draw(st.permutations(range(10)))[:num_layers]
    coordinates = [np.array(layers), np.arange(num_tokens), np.arange(num_heads), np.arange(dim)]
    expected = digest_numpy(content, coordinates, seed=5)
    held = Held(
        content,
        page_size=data.draw(st.integers(1, 5)),
        order=data.draw(st.sampled_from(ORDERS)),
        seed=data.draw(st.integers(0, 99)),
        layers=layers,
    )
    whole: dict[str, Any] = {"tokens": (0, num_tokens), "heads": (0, num_heads)}
    assert held.digest(**whole, num_threads=data.draw(st.integers(1, 3))) == expected
    cuts = [data.draw(st.integers(0, size)) for size in (num_layers, num_tokens, num_heads)]
    parts = [
        held.digest(which=which, tokens=tokens, heads=heads)
        for which in (slice(0, cuts[0]), slice(cuts[0], None))
        for tokens in ((0, cuts[1]), (cuts[1], num_tokens))
        for heads in ((0, cuts[2]), (cuts[2], num_heads))
    ]
    assert sum(parts) % 2**64 == expected
    assert held.digest(**whole, seed=6) != expected or not content.view(np.uint8).any()


@given(contents(), st.data())
def test_a_swap_of_unequal_elements_changes_the_digest(content: Content, data: st.DataObject) -> None:
    coordinates = [np.arange(size) for size in content.shape]
    whole = digest_numpy(content, coordinates, seed=1)
    changed = content.copy()
    flat = changed.reshape(-1)
    one, other = (data.draw(st.integers(0, flat.size - 1)) for _ in range(2))
    flat[one], flat[other] = content.reshape(-1)[other], content.reshape(-1)[one]
    same = content.tobytes() == changed.tobytes()
    assert (digest_numpy(changed, coordinates, seed=1) == whole) == same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_swapped_neighbours_and_changed_bits_change_the_digest(dtype: str, axis: int) -> None:
    rng = np.random.default_rng(0)
    width = np.dtype(dtype).itemsize
    content = rng.integers(0, 256, (2, 6, 3, 8, width), dtype=np.uint8).view(dtype)[..., 0]
    whole: dict[str, Any] = {"tokens": (0, 6), "heads": (0, 3)}

    def digest(of: Content) -> int:
        return Held(of, page_size=4, order=(0, 1, 2), seed=1, layers=[3, 4]).digest(**whole)

    expected = digest(content)
    assert digest(np.roll(content, 1, axis=axis)) != expected
    for bit in (0, 7):
        for places in ((0,), (0, 1), (0, 7)):
            changed = content.copy()
            for place in places:
                changed.view(np.uint8).reshape(-1, width)[place, -1] ^= 1 << bit
            assert digest(changed) != expected


def test_invalid_arguments_raise() -> None:
    layers, bases, runs = np.arange(1), np.zeros(1, np.uint64), np.array([[0, 0, 0, 0, 1]], dtype=np.int64)
    sizes: dict[str, Any] = {"row_stride": 0, "token_stride": 0, "itemsize": 1, "seed": 0}

    def refused(*arguments: Any, **changed: Any) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            _native.digest(*arguments, **(sizes | changed))
        return str(caught.value)

    assert "for each layer" in refused(layers, np.zeros(2, np.uint64), runs, [])
    assert "itemsize" in refused(layers, bases, runs, [], itemsize=16)
    assert "lengths" in refused(layers, bases, runs * 0, [])
    assert "num_threads" in refused(layers, bases, runs, [], num_threads=0)
    assert "2**48" in refused(layers, bases, runs, [(2**40, 1, 0), (2**40, 1, 0)])
    assert "2**48" in refused(layers, bases, np.full((3, 5), 2**63 - 1), [(2, 1, 0)])
    assert _native.digest(layers, bases, runs[:0], [], **sizes) == 0
    assert _native.digest(layers[:0], bases[:0], runs, [], **sizes) == 0
    wrong: list[tuple[Any, ...]] = [
        (layers, layers, runs, []),
        (layers, bases, runs[:, :4], []),
        (layers, bases, runs, [(1, 2)]),
        (layers, bases, runs, [(-1, 2, 3)]),
        (None, bases, runs, []),
    ]
    for arguments in wrong:
        with pytest.raises(TypeError):
            _native.digest(*arguments, **dict[str, Any](sizes))
