"""The coverage of a receive, against sets of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.protocol.receive_session import Coverage

RANGES = st.tuples(st.integers(0, 12), st.integers(0, 12))
LAYERS = st.none() | st.just((0, 1, 2)) | st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(need=RANGES, parts=st.lists(st.tuples(LAYERS, RANGES), max_size=12))
def test_coverage_equals_a_set_of_tokens(
    need: tuple[int, int], parts: list[tuple[tuple[int, ...] | None, tuple[int, int]]]
) -> None:
    coverage = Coverage((0, 1, 2), need)
    missing = {(layer, token) for layer in (0, 1, 2) for token in range(*need)}
    for layers, (start, stop) in parts:
        coverage.add(layers, start, stop)
        missing -= {(layer, token) for layer in (layers if layers is not None else range(3)) for token in range(start, stop)}
        assert coverage.complete is (not missing)
    assert {(layer, token) for layer, left in coverage.missing.items() for part in left for token in range(*part)} == missing


def test_a_malicious_complete_uses_little_memory() -> None:
    backwards = Coverage((0,), (0, 1 << 20))
    for _ in range(20):
        backwards.add(None, 1 << 20, 0)
    assert backwards.missing == {0: [(0, 1 << 20)]}
    comb = Coverage((0,), (0, 1 << 20))
    for token in range(20000):
        comb.add(None, 2 * token, 2 * token + 1)
    assert len(comb.missing[0]) == 20000
