"""One rank's memory against the reference: filled with the requests' contents, and compared byte by byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from disagg.commands.cases.instructions import Item
from disagg.commands.cases.memory import HostMemory, Memory
from disagg.commands.cases.places import RankPlace, global_axis
from disagg.commands.cases.sides import Side
from disagg.core.errors import ConfigError
from disagg.core.memory import ITEMSIZE
from disagg.core.topology import Topology
from disagg.models import ModelSpec
from disagg.models.pools import StagePools
from disagg.state.declare import Role, State, dtype_of
from disagg.testing import reference
from disagg.testing.reference import CANARY, Bytes, Pool
from disagg.testing.reference_numbers import convert, moderate


class Content:
    """Requests differ in their contents, so a mix-up is detected."""

    def __init__(
        self, model: ModelSpec, side: Side, topology: Topology, pools: StagePools, memory: Memory | None = None
    ) -> None:
        self.states = model.states
        self._rank = RankPlace(side, topology)
        self._axes = side.pool_shape(1).axes
        self._pools = pools
        self._memory = memory or HostMemory()
        self._base = pools.arena.__array_interface__["data"][0]
        self._wanted: tuple[tuple[Item, ...], str | None, Bytes] | None = None

    def clear(self) -> None:
        self._pools.arena.fill(CANARY)
        self._memory.push(self._pools.arena)

    def fill(self, items: Sequence[Item]) -> None:
        self._write(self._pools.arena, items)
        self._memory.push(self._pools.arena)

    def flip_byte(self, item: Item) -> None:
        """Flips the highest bit of the last element that the request has in this rank's first layer."""
        for state, role, _, view in self._tensors(self._pools.arena):
            _, row, offset = self._rank.entries(state, role, item)
            if len(row):
                entry = view[row[-1], offset[-1]]
                entry[(-1,) * entry.ndim] ^= 1 << (8 * entry.itemsize - 1)
                self._memory.push(self._pools.arena)
                return

    def page_range(self, item: Item, *, state: State, first_token: int, last_token: int) -> tuple[int, int]:
        """The range `[start, stop)` of the item's pages that hold this rank's tokens `[first_token, last_token)`."""
        first, _ = self._rank.page_range(state, item.tokens, item.needs[state.name])
        start, stop = self._rank.page_range(state, item.tokens, (first_token, last_token))
        return start - first, stop - first

    def difference(self, items: Sequence[Item], *, kv: str | None = None) -> str | None:
        """The first difference from `items` in their places and canary everywhere else. `kv`: as in `Check`."""
        wanted, found = self._expected(tuple(items), kv), self._pools.arena
        self._memory.pull(found)
        if np.array_equal(_words(wanted), _words(found)):
            return None
        for (state, role, layer, ours), (*_, theirs) in zip(self._tensors(wanted), self._tensors(found), strict=True):
            if (ours != theirs).any():
                return _describe(state, f"layer {layer}, tensor {role.name!r}", ours, theirs, items=items)
        return f"byte {int((wanted != found).argmax())} of the memory was written, but belongs to no tensor"

    def _expected(self, items: tuple[Item, ...], kv: str | None) -> Bytes:
        """Cached, because every run of a case ends with the same."""
        if self._wanted is None or self._wanted[:2] != (items, kv):
            wanted = np.empty_like(self._pools.arena)
            self._write(wanted, items, kv)
            self._wanted = items, kv, wanted
        return self._wanted[2]

    def _write(self, arena: Bytes, items: Sequence[Item], kv: str | None = None) -> None:
        arena.fill(CANARY)
        for state, role, layer, view in self._tensors(arena):
            own = dtype_of(role, state.name)
            given = kv if kv is not None and role.scale is not None else own
            runs, nbytes = self._runs(state, role, ITEMSIZE[given])
            for item in items:
                entries, row, offset = self._rank.entries(state, role, item)
                if not len(entries):
                    continue
                name = f"{state.name}/{item.number}"
                parts = [reference.rows(name, role.name, layer, tokens=entries, heads=run, nbytes=nbytes) for run in runs]
                content: Pool = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
                if role.scale is not None:
                    content = moderate(content.view(f"u{ITEMSIZE[given]}"), given)
                if given != own:
                    content = convert(content, given, own, scale=1.0)
                view[row, offset] = content.view(view.dtype).reshape(len(entries), *view.shape[2:])

    def _runs(self, state: State, role: Role, itemsize: int) -> tuple[list[range], int]:
        """The rows of a tensor's entry that this rank holds, as runs of consecutive rows, and the bytes of each.

        A row lies along the last axis, which no rank splits; the axes before it are numbered consecutively.
        """
        axes = [global_axis(state, role, axis) for axis in role.inner]
        nbytes = axes[-1].size * itemsize
        if len(axes) == 1:
            return [range(1)], nbytes
        held = np.asarray(axes[0].held(self._rank.place), dtype=np.int64)
        below = math.prod(axis.size for axis in axes[1:-1])
        runs = np.split(held, np.flatnonzero(np.diff(held) != 1) + 1)
        return [range(int(run[0]) * below, (int(run[-1]) + 1) * below) for run in runs], nbytes

    def _tensors(self, arena: Bytes) -> Iterator[tuple[State, Role, int, Pool]]:
        """Every tensor as a view `[row, token, *inner axes]` of unsigned integers; a slot has one token."""
        for state in self.states:
            for layer, tensors in self._pools.tensors[state.name].items():
                for role in state.roles:
                    yield state, role, layer, self._view(arena, state, role, tensors[role.name])

    def _view(self, arena: Bytes, state: State, role: Role, tensor: npt.NDArray[np.uint8]) -> Pool:
        at = tensor.__array_interface__["data"][0] - self._base
        placed: Pool = np.ndarray(tensor.shape, np.uint8, arena.data, at, tensor.strides)
        names = self._axes(role).split()
        rows = ["page", "token"] if state.rows == "pages" else ["slot"]
        view = placed.view(f"u{ITEMSIZE[dtype_of(role, state.name)]}").transpose([names.index(a) for a in (*rows, *role.inner)])
        view = view if state.rows == "pages" else view[:, None]
        expected = tuple(len(global_axis(state, role, axis).held(self._rank.place)) for axis in role.inner)
        if view.shape[2:] != expected:
            raise ConfigError(
                f"component {state.name!r}, tensor {role.name!r}, axes {', '.join(role.inner)}: expected sizes {expected} by "
                f"the reference, found {view.shape[2:]} in this rank's memory"
            )
        return view


def _words(arena: Bytes) -> Pool:
    """The widest integers compare fastest."""
    return arena.view(np.uint64) if arena.nbytes % 8 == 0 else arena


def _describe(state: State, tensor: str, ours: Pool, theirs: Pool, *, items: Sequence[Item]) -> str:
    differs = ours != theirs
    at = np.unravel_index(int(differs.argmax()), differs.shape)
    row, inner = int(at[0]), tuple(int(index) for index in at[1:])
    owner = next((f"request {item.number}, " for item in items if row in item.rows[state.name]), "")
    kind = "page" if state.rows == "pages" else "slot"
    return (
        f"{owner}component {state.name!r}: {tensor}, {kind} {row}{'' if owner else ', which belongs to no request'}: "
        f"{int(differs.sum())} elements differ, the first at {inner}: expected {int(ours[at]):#x}, found {int(theirs[at]):#x}"
    )
