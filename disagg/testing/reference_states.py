"""Reference implementation of transfers of any kind of state, from global arrays.

Independent of the planner. A state is a `StateModel`: tensors with global axes, of which a rank holds the positions that a
closed formula names, in slots, pages or rings. A rank's share is the global array, indexed axis by axis.

    >>> from disagg.testing.state_models import mamba2
    >>> model = mamba2(num_heads=4, head_dim=2, num_groups=1, state_size=3, kernel=4)
    >>> rank = StateRank(model=model, place=Place(tp=2, tp_rank=1), layers=(0, 3), form=Form(num_rows=5))
    >>> memory, wanted = allocate(rank), allocate(rank)
    >>> write(rank, wanted, Slots(2), request=1, num_tokens=9)
    >>> first_difference(wanted, memory)
    'tensor conv, layer 0: 60 of 300 bytes differ, the first at byte 120: expected 0xed, found 0xa5'
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from disagg.testing import reference
from disagg.testing.reference import CANARY, Bytes, KVRank, PageList, Pool
from disagg.testing.state_models import Place, StateModel, StateTensor

Ints = npt.NDArray[np.int64]

# -------------------------------------------------------------------------------------------------------- a rank's memory


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a rank's pools of one state lie in memory: `num_rows` slots, or pages (rings) of `page_size` tokens.

    `orders` lists a role's axes in memory order; the default is rows, tokens, then the global array's inner axes. `spare`
    positions of an axis are allocated after those in use. `one_page`: all tensors of a layer share one page or slot, with
    `gap` unused bytes at the end. `ring`: each row is the ring of one request, with token `t` at `t % page_size`.
    """

    num_rows: int
    page_size: int = 1
    orders: Mapping[str, str] = field(default_factory=dict)
    spare: Mapping[str, int] = field(default_factory=dict)
    one_page: bool = False
    gap: int = 0
    ring: bool = False


@dataclass(frozen=True, kw_only=True)
class StateRank:
    model: StateModel
    place: Place
    layers: tuple[int, ...]
    form: Form

    def axes(self, tensor: StateTensor) -> tuple[str, ...]:
        """In memory order."""
        usual = ["page", "token"] if self.model.paged else ["slot"]
        return tuple(self.form.orders.get(tensor.role, " ".join([*usual, *tensor.axes])).split())

    def sizes(self, tensor: StateTensor) -> dict[str, int]:
        rows = {"page": self.form.num_rows, "slot": self.form.num_rows, "token": self.form.page_size // tensor.granule}
        inner = {name: len(axis.held(self.place)) for name, axis in tensor.axes.items()}
        return {name: (rows | inner)[name] for name in self.axes(tensor)}

    @property
    def kv_rank(self) -> KVRank:
        """For `reference.tokens_of`."""
        place = self.place
        return KVRank(
            layers=self.layers,
            page_size=self.form.page_size,
            num_pages=self.form.num_rows,
            cp=place.cp,
            cp_rank=place.cp_rank,
            context=place.context,
        )


@dataclass(frozen=True)
class Memory:
    """`buffers` are all allocated bytes, `tensors` views of them."""

    buffers: dict[tuple[str, int], Bytes]
    tensors: dict[str, dict[int, Pool]]

    def clear(self, byte: int = CANARY) -> None:
        for buffer in self.buffers.values():
            buffer[...] = byte


def allocate(rank: StateRank, *, byte: int = CANARY) -> Memory:
    memory = Memory({}, {tensor.role: {} for tensor in rank.model.tensors})
    for layer in rank.layers:
        for name, buffer, tensors in _one_page(rank, byte) if rank.form.one_page else _separate(rank, byte):
            memory.buffers[name, layer] = buffer
            for role, pool in tensors.items():
                memory.tensors[role][layer] = pool
    return memory


def _separate(rank: StateRank, byte: int) -> Iterator[tuple[str, Bytes, dict[str, Pool]]]:
    for tensor in rank.model.tensors:
        sizes = rank.sizes(tensor)
        whole = [size + rank.form.spare.get(name, 0) for name, size in sizes.items()]
        buffer = np.full(int(np.prod(whole)) * tensor.itemsize, byte, dtype=np.uint8)
        used = tuple(slice(0, size) for size in sizes.values())
        yield tensor.role, buffer, {tensor.role: buffer.view(tensor.dtype).reshape(whole)[used]}


def _one_page(rank: StateRank, byte: int) -> Iterator[tuple[str, Bytes, dict[str, Pool]]]:
    starts, total = [], 0
    for tensor in rank.model.tensors:
        total = -(-total // tensor.itemsize) * tensor.itemsize
        starts.append(total)
        total += int(np.prod(list(rank.sizes(tensor).values())[1:])) * tensor.itemsize
    row = -(-(total + rank.form.gap) // 8) * 8 if any(t.itemsize > 1 for t in rank.model.tensors) else total + rank.form.gap
    buffer = np.full(rank.form.num_rows * row, byte, dtype=np.uint8)
    tensors: dict[str, Pool] = {}
    for tensor, start in zip(rank.model.tensors, starts, strict=True):
        shape = tuple(rank.sizes(tensor).values())
        inner = np.empty(shape[1:], dtype=tensor.dtype).strides
        tensors[tensor.role] = np.ndarray(shape, tensor.dtype, buffer.data, start, (row, *inner))
    yield "pages", buffer, tensors


# ---------------------------------------------------------------------------------------------------- content


@dataclass(frozen=True)
class Slots:
    id: int


@dataclass(frozen=True)
class Ring:
    id: int


StateRows = PageList | Slots | Ring


def global_array(model: StateModel, tensor: StateTensor, layer: int, *, request: int, num_entries: int) -> Pool:
    """`[entries, *inner axes]` of unsigned integers; no byte equals the canary.

    An element holds the first bytes of a 64-bit hash of (state, request, role, layer, entry, inner position).
    """
    sizes = tuple(axis.size for axis in tensor.axes.values())
    return _content(f"{model.name}#{request}", tensor.role, layer, (num_entries, *sizes), tensor.itemsize)


@functools.lru_cache(maxsize=256)
def _content(name: str, role: str, layer: int, shape: tuple[int, ...], itemsize: int) -> Pool:
    heads = range(int(np.prod(shape[1:])))
    content = reference.rows(name, role, layer, tokens=range(shape[0]), heads=heads, nbytes=itemsize)
    found: Pool = content.view(f"u{itemsize}").reshape(shape)
    found.flags.writeable = False
    return found


def share(rank: StateRank, tensor: StateTensor, whole: Pool) -> Pool:
    for number, axis in enumerate(tensor.axes.values()):
        whole = np.take(whole, np.array(axis.held(rank.place), dtype=np.int64), axis=1 + number)
    return whole


def write(
    rank: StateRank, memory: Memory, rows: StateRows, *, request: int, num_tokens: int, tokens: tuple[int, int] | None = None
) -> None:
    """Write every entry of the rank whose last token is in `tokens` (default: all). Raises `IndexError` if one has no page
    in `rows`.
    """
    for tensor in rank.model.tensors:
        entries, row, offset = _places(rank, tensor, rows, num_tokens, tokens or (0, num_tokens))
        if not len(entries):
            continue
        for layer, pool in memory.tensors[tensor.role].items():
            count = num_tokens // tensor.granule if rank.model.paged else 1
            local = share(rank, tensor, global_array(rank.model, tensor, layer, request=request, num_entries=count))
            view = _canonical(rank, tensor, pool)
            view[row, offset] = local[entries]


def _canonical(rank: StateRank, tensor: StateTensor, pool: Pool) -> Pool:
    """The pool as `[row, token, *inner axes]` of unsigned integers; a slot has one token."""
    names = rank.axes(tensor)
    order = [names.index(name) for name in (*(("page", "token") if rank.model.paged else ("slot",)), *tensor.axes)]
    view = pool.view(f"u{tensor.itemsize}").transpose(order)
    return view if rank.model.paged else view[:, None]


def _places(
    rank: StateRank, tensor: StateTensor, rows: StateRows, num_tokens: int, tokens: tuple[int, int]
) -> tuple[Ints, Ints, Ints]:
    """The entries of the global array that this rank holds, and the row and the offset of each."""
    if isinstance(rows, Slots):
        zero = np.zeros(1, dtype=np.int64)
        return zero, np.array([rows.id], dtype=np.int64), zero
    mine = reference.tokens_of(rank.kv_rank, num_tokens)
    found = []
    for local, token in enumerate(mine.tolist()):
        last = token + tensor.granule - 1
        if token % tensor.granule == 0 and tokens[0] <= last < tokens[1]:
            found.append((token // tensor.granule, *_place(rank, rows, local, mine, token)))
    entries, row, within = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return entries, row, within // tensor.granule


def _place(rank: StateRank, rows: StateRows, local: int, mine: Ints, token: int) -> tuple[int, int]:
    """The row and the offset of the rank's `local`-th token."""
    size = rank.form.page_size
    if isinstance(rows, Ring):
        return rows.id, token % size
    assert isinstance(rows, PageList)
    index = local // size - int((mine < rows.first_token).sum()) // size
    if not 0 <= index < len(rows.ids) or rows.ids[index] < 0:
        raise IndexError(f"token {token} has no page in {rows}")
    return rows.ids[index], local % size


def first_difference(wanted: Memory, found: Memory) -> str | None:
    """Describe the first byte that differs; `None` if there is none."""
    if wanted.buffers.keys() != found.buffers.keys():
        return f"buffers: expected {sorted(wanted.buffers)}, found {sorted(found.buffers)}"
    for (role, layer), ours in wanted.buffers.items():
        theirs = found.buffers[role, layer]
        differs = ours != theirs
        if differs.any():
            at = int(differs.argmax())
            return (
                f"tensor {role}, layer {layer}: {int(differs.sum())} of {differs.size} bytes differ, the first at byte {at}: "
                f"expected {int(ours[at]):#x}, found {int(theirs[at]):#x}"
            )
    return None
