"""What a transfer of any kind of state must leave in memory, told naively and from global arrays.

`reference` does this for paged KV; here a state is whatever its description says: tensors with global axes, of which a
rank holds the positions that a closed formula names, in slots, pages or rings. A global array has a value at every global
coordinate; a rank's share is that array, cut axis by axis with `numpy.take`. Nothing here knows layouts, pieces, plans or
strides of the library, and nothing of the library is called.

    >>> model = mamba2(num_heads=4, head_dim=2, num_groups=1, state_size=3, kernel=4)
    >>> rank = StateRank(model=model, place=Place(tp=2, tp_rank=1), layers=(0, 3), form=Form(num_rows=5))
    >>> memory, wanted = allocate(rank), allocate(rank)
    >>> write(rank, wanted, Slots(2), request=1, num_tokens=9)
    >>> first_difference(wanted, memory)
    'tensor conv, layer 0: 60 of 300 bytes differ, the first at byte 120: expected 0xed, found 0xa5'
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from disagg.testing import reference
from disagg.testing.reference import CANARY, Bytes, Context, KVRank, PageList, Pool, heads_of

Ints = npt.NDArray[np.int64]

# ------------------------------------------------------------------------------------------------ who holds which positions


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank of a group, in each kind of parallelism that cuts tensors."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    cp: int = 1
    cp_rank: int = 0
    context: Context = Context.WHOLE


@dataclass(frozen=True)
class GlobalAxis:
    """An axis of `size` global positions; `held` names those of a rank, in the order in which it stores them."""

    size: int
    held: Callable[[Place], Sequence[int]]


def replicated(size: int) -> GlobalAxis:
    """Every rank has all of it."""
    return GlobalAxis(size, lambda _: range(size))


def per_head(count: int) -> GlobalAxis:
    """Heads, or channels: each rank has some; with more ranks than heads, neighbours have the same one."""
    return GlobalAxis(count, lambda place: heads_of(count, tp=place.tp, tp_rank=place.tp_rank))


@dataclass(frozen=True)
class Part:
    """A part of a fused axis: `count` heads or groups of `width` channels.

    `grouped`: where groups and ranks do not divide each other, every rank has all groups.
    """

    count: int
    width: int
    grouped: bool = False

    def channels(self, place: Place) -> Iterator[int]:
        """The part's own channels that a rank has."""
        heads: Iterable[int] = heads_of(self.count, tp=place.tp, tp_rank=place.tp_rank)
        if self.grouped and self.count % place.tp and place.tp % self.count:
            heads = range(self.count)
        return (head * self.width + channel for head in heads for channel in range(self.width))


def fused(*parts: Part) -> GlobalAxis:
    """Parts one behind the other, each cut on its own: a rank has `x_r ‖ B_r ‖ C_r`."""

    def held(place: Place) -> list[int]:
        channels: list[int] = []
        start = 0
        for part in parts:
            channels += [start + channel for channel in part.channels(place)]
            start += part.count * part.width
        return channels

    return GlobalAxis(sum(part.count * part.width for part in parts), held)


def experts(count: int) -> GlobalAxis:
    """Experts by `ep_rank = tp_rank // moe_tp_size`, with `moe_tp_size = tp // ep`."""

    def held(place: Place) -> Sequence[int]:
        moe_tp_size = place.tp // place.ep
        return heads_of(count, tp=place.ep, tp_rank=place.tp_rank // moe_tp_size)

    return GlobalAxis(count, held)


def intermediate(size: int) -> GlobalAxis:
    """The intermediate dimension of experts by `moe_tp_rank = tp_rank % moe_tp_size`."""

    def held(place: Place) -> Sequence[int]:
        moe_tp_size = place.tp // place.ep
        return heads_of(size, tp=moe_tp_size, tp_rank=place.tp_rank % moe_tp_size)

    return GlobalAxis(size, held)


# ------------------------------------------------------------------------------------------------------- models of state


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor per layer: its inner axes in the order of the global array. `granule` tokens have one entry in it."""

    role: str
    axes: Mapping[str, GlobalAxis]
    dtype: str = "uint16"
    granule: int = 1

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class StateModel:
    """A kind of state as the model defines it, before anyone shards it. Without `paged` a request has one slot."""

    name: str
    tensors: tuple[StateTensor, ...]
    paged: bool = False


def gqa(
    *,
    num_kv_heads: int,
    dims: tuple[int, int],
    dtype: str = "uint16",
    scales: int = 0,
    scales_dtype: str = "float32",
    name: str = "kv",
) -> StateModel:
    """K and V, by head, and `scales` block scales per head and token beside each."""
    heads = per_head(num_kv_heads)
    tensors = [
        StateTensor(role=role, axes={"kv_head": heads, "dim": replicated(dim)}, dtype=dtype)
        for role, dim in zip(("k", "v"), dims, strict=True)
    ]
    if scales:
        axes = {"kv_head": heads, "dim": replicated(scales)}
        tensors += [StateTensor(role=role, axes=axes, dtype=scales_dtype) for role in ("k_scale", "v_scale")]
    return StateModel(name=name, tensors=tuple(tensors), paged=True)


def mla(*, dim: int, dtype: str = "uint16", scales: int = 0, scales_dtype: str = "float32", name: str = "mla") -> StateModel:
    """The latent, the same on every rank, and `scales` block scales per token beside it."""
    latent = StateTensor(role="latent", axes={"dim": replicated(dim)}, dtype=dtype)
    scale = StateTensor(role="latent_scale", axes={"dim": replicated(scales)}, dtype=scales_dtype)
    return StateModel(name=name, tensors=(latent, scale) if scales else (latent,), paged=True)


def gdn(
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    kernel: int,
    dtypes: tuple[str, str] = ("uint16", "float32"),
    name: str = "ssm",
) -> StateModel:
    """Gated delta net: `conv` over `q ‖ k ‖ v`, `temporal` per value head."""
    channels = fused(
        Part(num_key_heads, key_head_dim), Part(num_key_heads, key_head_dim), Part(num_value_heads, value_head_dim)
    )
    return StateModel(
        name=name,
        tensors=(
            _conv("conv", channels, kernel, dtypes[0]),
            _temporal(num_value_heads, key_head_dim, value_head_dim, dtypes[1]),
        ),
    )


def kda(
    *,
    num_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    kernel: int,
    dtypes: tuple[str, str] = ("uint16", "float32"),
    separate: bool = False,
    name: str = "ssm",
) -> StateModel:
    """Kimi delta attention: `conv` over `q ‖ k ‖ v`, or three tensors where they are separate; `temporal` per head."""
    q, k, v = Part(num_heads, key_head_dim), Part(num_heads, key_head_dim), Part(num_heads, value_head_dim)
    convs = {"conv_q": fused(q), "conv_k": fused(k), "conv_v": fused(v)} if separate else {"conv": fused(q, k, v)}
    return StateModel(
        name=name,
        tensors=(
            *(_conv(role, channels, kernel, dtypes[0]) for role, channels in convs.items()),
            _temporal(num_heads, key_head_dim, value_head_dim, dtypes[1]),
        ),
    )


def mamba2(
    *,
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
    kernel: int,
    dtypes: tuple[str, str] = ("uint16", "float32"),
    name: str = "ssm",
) -> StateModel:
    """Mamba2: `conv` over `x ‖ B ‖ C`, `temporal` per head; groups that cannot be shared out are on every rank."""
    group = Part(num_groups, state_size, grouped=True)
    axes = {"head": per_head(num_heads), "head_dim": replicated(head_dim), "state": replicated(state_size)}
    return StateModel(
        name=name,
        tensors=(
            _conv("conv", fused(Part(num_heads, head_dim), group, group), kernel, dtypes[0]),
            StateTensor(role="temporal", axes=axes, dtype=dtypes[1]),
        ),
    )


def mamba1(
    *, inner: int, state_size: int, kernel: int, dtypes: tuple[str, str] = ("uint16", "float32"), name: str = "ssm"
) -> StateModel:
    """Mamba1: both tensors by channel."""
    axes = {"channel": per_head(inner), "state": replicated(state_size)}
    temporal = StateTensor(role="temporal", axes=axes, dtype=dtypes[1])
    return StateModel(name=name, tensors=(_conv("conv", per_head(inner), kernel, dtypes[0]), temporal))


def lightning(
    *, num_heads: int, key_head_dim: int, value_head_dim: int, dtype: str = "float32", name: str = "ssm"
) -> StateModel:
    """Lightning attention: `temporal` per head."""
    return StateModel(name=name, tensors=(_temporal(num_heads, key_head_dim, value_head_dim, dtype),))


def index_keys(*, key_nbytes: int, scale_nbytes: int = 0, granule: int = 1, name: str = "index") -> StateModel:
    """Index keys and their scales, in bytes, the same on every rank; one of each for `granule` tokens."""
    sizes = {"key": key_nbytes, "scale": scale_nbytes}
    tensors = (
        StateTensor(role=role, axes={"byte": replicated(nbytes)}, dtype="uint8", granule=granule)
        for role, nbytes in sizes.items()
        if nbytes
    )
    return StateModel(name=name, tensors=tuple(tensors), paged=True)


def compressed(*, dim: int, ratio: int, dtype: str = "uint16", name: str) -> StateModel:
    """One entry of `dim` elements for `ratio` tokens, the same on every rank."""
    tensor = StateTensor(role="latent", axes={"dim": replicated(dim)}, dtype=dtype, granule=ratio)
    return StateModel(name=name, tensors=(tensor,), paged=True)


def _conv(role: str, channels: GlobalAxis, kernel: int, dtype: str) -> StateTensor:
    return StateTensor(role=role, axes={"channel": channels, "width": replicated(kernel - 1)}, dtype=dtype)


def _temporal(num_heads: int, key_dim: int, value_dim: int, dtype: str) -> StateTensor:
    axes = {"head": per_head(num_heads), "key_dim": replicated(key_dim), "value_dim": replicated(value_dim)}
    return StateTensor(role="temporal", axes=axes, dtype=dtype)


# -------------------------------------------------------------------------------------------------------- a rank's memory


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a rank's pools of one state lie in memory: `num_rows` slots, or pages (rings) of `page_size` tokens.

    `orders` names a role's axes in memory order where they are not the usual ones (rows, tokens, inner axes as the global
    array has them). `spare` positions of an axis are allocated behind those in use. `one_page`: all tensors of a layer
    share one page or slot, each tensor's part behind the one before, with `gap` bytes left over at its end. `ring`: rows
    are rings, one per request, of which token `t` is at `t % page_size`.
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
    """One rank's share of one state."""

    model: StateModel
    place: Place
    layers: tuple[int, ...]
    form: Form

    def axes(self, tensor: StateTensor) -> tuple[str, ...]:
        """The tensor's axes in memory order."""
        usual = ["page", "token"] if self.model.paged else ["slot"]
        return tuple(self.form.orders.get(tensor.role, " ".join([*usual, *tensor.axes])).split())

    def sizes(self, tensor: StateTensor) -> dict[str, int]:
        """How many positions of each axis this rank has."""
        rows = {"page": self.form.num_rows, "slot": self.form.num_rows, "token": self.form.page_size // tensor.granule}
        inner = {name: len(axis.held(self.place)) for name, axis in tensor.axes.items()}
        return {name: (rows | inner)[name] for name in self.axes(tensor)}

    @property
    def kv_rank(self) -> KVRank:
        """What the reference of paged KV must know to say which tokens this rank has."""
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
    """A rank's pools: `buffers` are all bytes that were allocated, `tensors` (by role and layer) what lies in them."""

    buffers: dict[tuple[str, int], Bytes]
    tensors: dict[str, dict[int, Pool]]

    def clear(self, byte: int = CANARY) -> None:
        for buffer in self.buffers.values():
            buffer[...] = byte


def allocate(rank: StateRank, *, byte: int = CANARY) -> Memory:
    """New pools, each byte of them `byte`."""
    memory = Memory({}, {tensor.role: {} for tensor in rank.model.tensors})
    for layer in rank.layers:
        for name, buffer, tensors in _one_page(rank, byte) if rank.form.one_page else _apart(rank, byte):
            memory.buffers[name, layer] = buffer
            for role, pool in tensors.items():
                memory.tensors[role][layer] = pool
    return memory


def _apart(rank: StateRank, byte: int) -> Iterator[tuple[str, Bytes, dict[str, Pool]]]:
    """Each tensor in a buffer of its own."""
    for tensor in rank.model.tensors:
        sizes = rank.sizes(tensor)
        whole = [size + rank.form.spare.get(name, 0) for name, size in sizes.items()]
        buffer = np.full(int(np.prod(whole)) * tensor.itemsize, byte, dtype=np.uint8)
        used = tuple(slice(0, size) for size in sizes.values())
        yield tensor.role, buffer, {tensor.role: buffer.view(tensor.dtype).reshape(whole)[used]}


def _one_page(rank: StateRank, byte: int) -> Iterator[tuple[str, Bytes, dict[str, Pool]]]:
    """All tensors of a layer in rows of one buffer, each at its offset in the row."""
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


# ---------------------------------------------------------------------------------------------------- content and places


@dataclass(frozen=True)
class Slots:
    """The slot that a request has."""

    id: int


@dataclass(frozen=True)
class Ring:
    """The ring that a request has."""

    id: int


StateRows = PageList | Slots | Ring


def global_array(model: StateModel, tensor: StateTensor, layer: int, *, request: int, num_entries: int) -> Pool:
    """`[entries, *inner axes]` of unsigned integers: a value of its own for every coordinate, and no byte a canary.

    An element is as many bytes of a 64-bit word hashed from (state, request, role, layer, entry, inner position).
    """
    sizes = tuple(axis.size for axis in tensor.axes.values())
    return _content(f"{model.name}#{request}", tensor.role, layer, (num_entries, *sizes), tensor.itemsize)


@functools.lru_cache(maxsize=256)
def _content(name: str, role: str, layer: int, shape: tuple[int, ...], itemsize: int) -> Pool:
    """A global array, read-only: every rank cuts its share from the same."""
    heads = range(int(np.prod(shape[1:])))
    content = reference.rows(name, role, layer, tokens=range(shape[0]), heads=heads, nbytes=itemsize)
    found: Pool = content.view(f"u{itemsize}").reshape(shape)
    found.flags.writeable = False
    return found


def share(rank: StateRank, tensor: StateTensor, whole: Pool) -> Pool:
    """The rank's positions of a global array, all entries, axis by axis."""
    for number, axis in enumerate(tensor.axes.values()):
        whole = np.take(whole, np.array(axis.held(rank.place), dtype=np.int64), axis=1 + number)
    return whole


def write(
    rank: StateRank, memory: Memory, rows: StateRows, *, request: int, num_tokens: int, tokens: tuple[int, int] | None = None
) -> None:
    """Put the rank's share of a request where it belongs: every entry whose last token is in `tokens` (default: all).

    Raises `IndexError` where such an entry has no page in `rows`.
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
    """The pool as `[row, token, *inner axes]` of unsigned integers, a view; a slot has one token."""
    names = rank.axes(tensor)
    order = [names.index(name) for name in (*(("page", "token") if rank.model.paged else ("slot",)), *tensor.axes)]
    view = pool.view(f"u{tensor.itemsize}").transpose(order)
    return view if rank.model.paged else view[:, None]


def _places(
    rank: StateRank, tensor: StateTensor, rows: StateRows, num_tokens: int, tokens: tuple[int, int]
) -> tuple[Ints, Ints, Ints]:
    """Entries of the global array that this rank must have, and for each its row and its place in the row."""
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
    """Row and offset in tokens of the rank's `local`-th token of the request."""
    size = rank.form.page_size
    if isinstance(rows, Ring):
        return rows.id, token % size
    assert isinstance(rows, PageList)
    index = local // size - int((mine < rows.first_token).sum()) // size
    if not 0 <= index < len(rows.ids) or rows.ids[index] < 0:
        raise IndexError(f"token {token} has no page in {rows}")
    return rows.ids[index], local % size


def first_difference(wanted: Memory, found: Memory) -> str | None:
    """Where two memories first differ in a byte, in words; `None` where they do not."""
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
