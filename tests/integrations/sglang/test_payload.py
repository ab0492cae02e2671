"""Metadata buffers as a payload, and rows from lists, without SGLang."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from disagg import LayoutError, RemoteProtocolError
from disagg.core.topology import Topology
from disagg.integrations.handoff import Payload
from disagg.integrations.sglang.facts import Facts
from disagg.integrations.sglang.payload import MetadataBuffers
from disagg.integrations.sglang.rows import needs, state_rows, to_the_end


def buffers(*arrays: npt.NDArray[Any]) -> MetadataBuffers:
    return MetadataBuffers([a.ctypes.data for a in arrays], [a[0].nbytes for a in arrays])


def test_metadata_travel_to_another_row() -> None:
    source: list[npt.NDArray[Any]] = [np.arange(64, dtype=np.int32).reshape(4, 16), np.zeros((4, 8192), np.float16)]
    destination: list[npt.NDArray[Any]] = [np.full((6, 16), -1, np.int32), np.full((6, 8192), 7, np.float16)]
    source[1][2, 5] = 3
    data = Payload(engine="sglang", num_tokens=9, native=buffers(*source).read(2)).encode()
    assert len(data) < 256  # zeros at the end of a row are not sent
    buffers(*destination).write(5, Payload.decode(data).native)
    for ours, theirs in zip(source, destination, strict=True):
        assert np.array_equal(ours[2], theirs[5])
        assert (theirs[:5] == theirs[0, 0]).all()


def test_metadata_that_do_not_fit_change_nothing() -> None:
    array, wider = np.full((2, 4), 9, np.int32), np.full((2, 8), 5, np.int32)
    for rows, message in (
        (buffers(wider).read(0), "metadata buffer 0: expected at most 16 bytes, found 29"),
        (buffers(array, array).read(0), "expected 1 metadata buffers, found 2"),
    ):
        with pytest.raises(RemoteProtocolError, match=message):
            buffers(array).write(1, rows)
        assert (array == 9).all()


def test_lists_end_at_the_last_page() -> None:
    assert to_the_end([7, 8], 100, page_size=16).first_token == 80
    assert to_the_end([7, 8], 96, page_size=16).first_token == 64
    assert to_the_end([], 96, page_size=16).first_token == 96
    with pytest.raises(LayoutError, match="expected at most 1 pages for 5 tokens of 16 a page, found 2"):
        to_the_end([7, 8], 5, page_size=16)


def test_missing_state_lists_are_named() -> None:
    facts = Facts(topology=Topology())
    with pytest.raises(LayoutError, match="state list of 'swa': expected indices, found none"):
        state_rows(["swa"], [None], num_tokens=5, page_size=16, facts=facts)
    with pytest.raises(LayoutError, match="expected 1, one for each kind of state, found 0"):
        state_rows(["swa"], None, num_tokens=5, page_size=16, facts=facts)


def test_a_window_needs_its_own_tokens_only() -> None:
    rows = {"kv": to_the_end(range(7), 100, page_size=16), "window": to_the_end([1, 2, 3], 100, page_size=16)}
    facts = Facts(topology=Topology(), window=20)
    assert needs(rows, num_tokens=100, prefix=0, facts=facts) == {"kv": (0, 100), "window": (80, 100)}
    assert needs(rows, num_tokens=100, prefix=96, facts=facts) == {"kv": (96, 100), "window": (96, 100)}
