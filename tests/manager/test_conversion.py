"""A peer that holds the numbers in another format gets them converted; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from disagg import Component, ConfigError, KVManager, ModelId, Pages, PeerUnreachable, Topology, new_request_id
from disagg.backends.base import StagingShape
from disagg.backends.local import LocalBackend
from disagg.core.memory import RawTensor
from disagg.protocol.types import Event
from disagg.state import paged
from disagg.testing.reference_numbers import FORMATS, convert, same
from disagg.transfer.pool_memory import GpuPacker, PoolMemory
from tests.support.cluster import DEADLINE_S, FAST, FAST_LINKS
from tests.support.host_kernels import HostMover, Spans

HEADS, DIMS, LAYERS, NUM_PAGES = 4, {"k": 6, "v": 4}, 3, 24
CANARY = 0xA5
Scales = Mapping[int, Any] | float | None


class SmallSlots(LocalBackend):
    """The `local` engine with slots that end inside elements."""

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1 << 10, slot_nbytes=1001, window=3, num_lent=5)


@dataclass(frozen=True)
class Holder:
    """One instance: how its ranks hold K and V."""

    dtype: str
    tp: int = 1
    page: int = 4
    axes: str = "page token kv_head dim"
    k_scale: Scales = 1.0
    v_scale: Scales = 1.0
    rounding: str | None = "nearest"
    by_head: bool = False

    def scale(self, role: str, layer: int) -> Any:
        """What `[token, head, dim]` is multiplied by."""
        given = {"k": self.k_scale, "v": self.v_scale}[role]
        found = np.array(given[layer] if isinstance(given, Mapping) else given or 1.0)
        return found[:, None] if found.ndim else found


@dataclass(frozen=True)
class Rank:
    topology: Topology
    pools: dict[tuple[str, int], npt.NDArray[Any]]
    component: Component


def make_rank(holder: Holder, tp_rank: int) -> Rank:
    """Pools full of canaries, and their component."""
    topology, form = Topology(tp=holder.tp, tp_rank=tp_rank), FORMATS[holder.dtype]
    pools, tensors = {}, {}
    for layer in range(LAYERS):
        for role, dim in DIMS.items():
            sizes = {"page": NUM_PAGES, "token": holder.page, "kv_head": HEADS // holder.tp, "dim": dim}
            pool = np.full([sizes[axis] for axis in holder.axes.split()], 0, dtype=form.dtype)
            pool.view(np.uint8)[...] = CANARY
            pools[role, layer] = pool
        tensors[layer] = tuple(
            RawTensor(pool.ctypes.data, pool.shape, tuple(s // pool.itemsize for s in pool.strides), holder.dtype, owner=pool)
            for pool in (pools["k", layer], pools["v", layer])
        )
    component = paged.gqa(
        tensors, axes=holder.axes, num_kv_heads=HEADS, topology=topology, k_scale=holder.k_scale, v_scale=holder.v_scale,
        scales_by_head=holder.by_head, rounding=holder.rounding,
    )  # fmt: skip
    return Rank(topology, pools, component)


def place(holder: Holder, rank: Rank, numbers: Mapping[tuple[str, int], Any], pages: Sequence[int], tokens: range) -> None:
    """Write tokens of `numbers`, `[token, head, dim]` by role and layer, into a rank's pools."""
    heads = HEADS // holder.tp
    own = slice(rank.topology.tp_rank * heads, (rank.topology.tp_rank + 1) * heads)
    for key, pool in rank.pools.items():
        plain = np.moveaxis(pool, [holder.axes.split().index(axis) for axis in ("page", "token", "kv_head", "dim")], range(4))
        for token in tokens:
            plain[pages[token // holder.page], token % holder.page] = numbers[key][token, own]


@contextmanager
def connected(
    prefill: Holder, decode: Holder, *, backend: Any = SmallSlots, ready: bool = True, **settings: Any
) -> Iterator[tuple[list[Rank], list[Rank], list[KVManager], list[KVManager]]]:
    """Two instances: their ranks, and their managers."""
    with ExitStack() as stack:
        sides: list[tuple[list[Rank], list[KVManager]]] = []
        for name, holder in (("prefill-0", prefill), ("decode-0", decode)):
            ranks = [make_rank(holder, number) for number in range(holder.tp)]
            managers: list[KVManager] = []
            for rank in ranks:
                manager = KVManager(
                    name=name, topology=rank.topology, components=[rank.component], model=ModelId("toy"), backend=backend,
                    limits=FAST, connection_limits=FAST_LINKS, leader=managers[0].address if managers else None, **settings,
                )  # fmt: skip
                stack.callback(manager.close)
                managers.append(manager)
            sides.append((ranks, managers))
        (sources, senders), (destinations, receivers) = sides
        for manager in senders:
            manager.add_peer("decode-0", address=receivers[0].address)
        for manager in receivers:
            manager.add_peer("prefill-0", address=senders[0].address)
        for manager in (*senders, *receivers) if ready else ():
            manager.wait_ready("decode-0" if manager in senders else "prefill-0", timeout_s=DEADLINE_S)
        yield sources, destinations, senders, receivers


def move(
    sides: tuple[list[Rank], list[Rank], list[KVManager], list[KVManager]],
    pages: tuple[Sequence[int], Sequence[int]],
    num_tokens: int,
    first_token: int = 0,
) -> list[Event]:
    """Send a request in two chunks. `pages` are those of both sides, of all tokens."""
    _, _, senders, receivers = sides
    request, handles = new_request_id(), []
    for manager in receivers:
        rows = {"kv": Pages(np.array(pages[1], dtype=np.int32))}
        need = {"kv": (first_token, num_tokens)}
        handles.append(manager.receiver(request, peer="prefill-0", rows=rows, need=need, deadline_s=DEADLINE_S))
    sent = []
    for manager in senders:
        sender = manager.sender(request, peer="decode-0", deadline_s=DEADLINE_S)
        for start, stop in ((0, num_tokens // 3), (num_tokens // 3, num_tokens)):
            sender.send({"kv": Pages(np.array(pages[0], dtype=np.int32))}, tokens=(start, stop))
        sender.finish()
        sent.append(sender)
    return [handle.wait(timeout_s=DEADLINE_S) for handle in (*handles, *sent)]


BF16, E4M3 = "bfloat16", "float8_e4m3fn"
BY_LAYER = {0: 0.5, 1: 0.02, 2: 3.0}
BY_HEAD = {layer: [0.03 * (layer + 1), 0.5, 2.0 + layer, 0.1] for layer in range(LAYERS)}
HALVES = {layer: np.full(HEADS, 0.5) for layer in range(LAYERS)}
NHD, HND, LAST = "page token kv_head dim", "page kv_head token dim", "kv_head page dim token"
PAIRS = {
    "quantized": (Holder(BF16), Holder(E4M3, k_scale=BY_LAYER, v_scale=0.25)),
    "TP 2 to 1": (Holder(BF16, tp=2), Holder(E4M3, page=8, k_scale=0.1, v_scale=BY_LAYER)),
    "TP 1 to 4": (Holder("float32", page=8), Holder("float8_e5m2", tp=4, axes=HND, rounding="unbounded")),
    "toward zero": (Holder(BF16, tp=2), Holder(E4M3, page=16, k_scale=0.1, v_scale=BY_LAYER, rounding="toward_zero")),
    "TP 4 to 2": (Holder(BF16, tp=4, page=16, axes=HND), Holder(E4M3, tp=2, axes=NHD, k_scale=0.7, v_scale=0.3)),
    "strided": (Holder("float16", axes=LAST), Holder(E4M3, page=8, k_scale=2.0, v_scale=2.0)),
    "back": (Holder(E4M3, tp=2, k_scale=BY_LAYER, v_scale=0.3), Holder(BF16, page=16, axes=HND)),
    "back, strided": (Holder("float8_e5m2", k_scale=4.0, v_scale=4.0), Holder("float32", tp=2, axes=LAST)),
    "wider": (Holder("float16"), Holder("float32", tp=2, page=8)),
    "other": (Holder(BF16, tp=2, axes=HND, rounding=None), Holder("float16", page=2, rounding=None)),
    "copied": (Holder(E4M3, k_scale=0.5, v_scale=BY_LAYER), Holder(E4M3, tp=2, k_scale=0.5, v_scale=BY_LAYER)),
    "by head": (Holder(BF16), Holder(E4M3, k_scale=BY_HEAD, v_scale=HALVES, by_head=True)),
    "by head, TP 4 to 2": (
        Holder(BF16, tp=4, page=8, axes=HND),
        Holder(E4M3, tp=2, axes=NHD, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
    ),
    "by head, TP 1 to 4": (
        Holder("float32", axes=LAST),
        Holder(E4M3, tp=4, page=16, axes=HND, k_scale=HALVES, v_scale=BY_HEAD, by_head=True),
    ),
    "by head, back": (
        Holder("float8_e5m2", tp=2, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
        Holder(BF16, page=16, axes=HND),
    ),
    "by head, copied": (
        Holder(E4M3, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
        Holder(E4M3, tp=2, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
    ),
    "copied, rounding unknown": (Holder(E4M3, k_scale=0.5, rounding=None), Holder(E4M3, k_scale=0.5)),
}


def check(prefill: Holder, decode: Holder, num_tokens: int, first_token: int, *, seed: int, **settings: Any) -> None:
    """Move random bits, and compare every byte of decode's pools."""
    rng = np.random.default_rng(seed)
    form = FORMATS[prefill.dtype]
    numbers = {
        (role, layer): rng.integers(0, 2**form.bits, (num_tokens, HEADS, dim), dtype=np.uint64).astype(form.dtype)
        for role, dim in DIMS.items()
        for layer in range(LAYERS)
    }
    pages = tuple(rng.permutation(NUM_PAGES)[: -(-num_tokens // holder.page)].tolist() for holder in (prefill, decode))
    with connected(prefill, decode, **settings) as sides:
        for rank in sides[0]:
            place(prefill, rank, numbers, pages[0], range(num_tokens))
        events = move(sides, (pages[0], pages[1]), num_tokens, first_token)
        assert [event.error for event in events if not event.ok] == []
    quantized = prefill.dtype.startswith("float8")
    expected = numbers
    if prefill.dtype != decode.dtype:
        expected = {
            key: convert(
                stored, prefill.dtype, decode.dtype, scale=(prefill if quantized else decode).scale(*key),
                rounding=decode.rounding or "nearest",
            )
            for key, stored in numbers.items()
        }  # fmt: skip
    for rank in sides[1]:
        wanted = make_rank(decode, rank.topology.tp_rank)
        place(decode, wanted, expected, pages[1], range(first_token, num_tokens))
        for key, pool in rank.pools.items():
            assert same(pool, wanted.pools[key], decode.dtype), (rank.topology, key)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_element_is_stored_as_the_destination_stores_it(pair: tuple[Holder, Holder]) -> None:
    check(*pair, num_tokens=29, first_token=3, seed=1)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_an_engine_that_takes_span_classes_converts_in_its_copy(pair: tuple[Holder, Holder]) -> None:
    """As `nvlink`, on the host: nothing is packed."""
    before = Spans.posted
    check(*pair, num_tokens=29, first_token=3, seed=3, backend=Spans, pack_below=0)
    assert Spans.posted > before


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_gpu_kernels_convert_what_they_pack(pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels' reference implementation. Slots end inside elements."""
    monkeypatch.setattr(PoolMemory, "packer", lambda self, shapes: GpuPacker(HostMover(), shapes))  # type: ignore[arg-type]
    before = HostMover.moved
    check(*pair, num_tokens=29, first_token=3, seed=4)
    assert HostMover.moved > before


@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
def test_engines_move_what_was_converted(backend: str) -> None:
    check(*PAIRS["TP 2 to 1"], num_tokens=31, first_token=0, seed=2, backend=backend, pack_below=1 << 12)


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)

    def holder(dtype: str) -> Holder:
        scale = float(rng.choice([0.03, 0.5, 1.0, 7.0])) if dtype.startswith("float8") else 1.0
        by_head = bool(rng.integers(2)) and dtype.startswith("float8")
        by_layer: dict[int, Any] = {
            layer: scale * (layer + 1 if dtype.startswith("float8") else 1) * np.array(1 + np.arange(HEADS) if by_head else 1)
            for layer in range(LAYERS)
        }
        axes = str(rng.choice([NHD, HND, LAST]))
        v_scale = by_layer if by_head else scale
        sizes = int(rng.choice([1, 2, 4])), int(rng.choice([2, 4, 8]))
        return Holder(dtype, *sizes, axes, by_layer, v_scale, by_head=by_head)

    pair = [("float32", E4M3), (BF16, E4M3), (BF16, "float8_e5m2"), (E4M3, BF16), (BF16, "float16"), ("float16", "float32")]
    source, destination = pair[seed % len(pair)]
    num_tokens = int(rng.integers(1, 45))
    check(holder(source), holder(destination), num_tokens, int(rng.integers(0, num_tokens)), seed=seed)


NO_SCALE = Holder(BF16, k_scale=None, v_scale=None)
REFUSED = {
    "one side has no scale": (Holder(BF16), NO_SCALE, "any with scales"),
    "other dtypes without scales": (
        NO_SCALE,
        Holder(E4M3, k_scale=None, v_scale=None),
        r"dtype: (bfloat16 here, float8_e4m3fn|float8_e4m3fn here, bfloat16) at the peer",
    ),
    "other scales": (
        Holder(E4M3, k_scale=0.5),
        Holder(E4M3, k_scale=0.25),
        r"layer 0: scales 0\.(5|25) and 0\.(25|5): .* quantized twice",
    ),
    "other scales of a head": (
        Holder(E4M3, k_scale=BY_HEAD, v_scale=HALVES, by_head=True),
        Holder(E4M3, tp=2, k_scale=BY_HEAD | {1: [0.06, 0.5, 4.0, 0.1]}, v_scale=HALVES, by_head=True),
        r"layer 1, kv_head 2: scales (3\.0 and 4\.0|4\.0 and 3\.0): .* quantized twice",
    ),
    "by head and by layer": (
        Holder(E4M3, k_scale=0.5, v_scale=0.5),
        Holder(E4M3, k_scale=HALVES, v_scale=HALVES, by_head=True),
        r"scales by (layer|kv_head) and by (kv_head|layer): .* quantized twice",
    ),
    "quantized twice": (
        Holder(E4M3),
        Holder("float8_e5m2"),
        r"float8_e(4m3fn|5m2) and float8_e(5m2|4m3fn): .* quantized twice",
    ),
    "a rounding that is not known": (
        Holder(BF16, rounding=None),
        Holder(E4M3, rounding=None),
        "expected the same dtype, since only the engine itself can make its float8_e4m3fn",
    ),
    "prefill's rounding is not known": (
        Holder(E4M3, rounding=None),
        Holder(BF16),
        "expected the same dtype, since only the engine itself can make its float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_pairs_without_a_rule_are_refused_by_name(case: tuple[Holder, Holder, str]) -> None:
    prefill, decode, match = case
    with connected(prefill, decode, ready=False) as (_, _, senders, _), pytest.raises(PeerUnreachable, match=match):
        senders[0].wait_ready("decode-0", timeout_s=1.0)


def test_a_side_that_packs_nothing_is_refused_by_name() -> None:
    with (
        connected(*PAIRS["quantized"], ready=False, pack_below=0) as (_, _, senders, _),
        pytest.raises(PeerUnreachable, match=r"component 'kv': expected slots on both sides.*pack_below is 0"),
    ):
        senders[0].wait_ready("decode-0", timeout_s=1.0)


def test_converted_state_cannot_be_verified() -> None:
    with connected(*PAIRS["quantized"], verify="full") as sides:
        events = move(sides, (range(8), range(8)), 29)
    assert all("expected verify='off', since it is converted on its way" in str(event.error) for event in events)


WRONG = {
    "a scale for integers": ("int8", 1.0, r"expected a dtype among float32, .* for scales, found int8"),
    "a scale of floats": (BF16, 0.5, r"expected scale 1 for bfloat16, found 0\.5"),
    "zero": (E4M3, 0.0, r"scales: expected positive numbers of single precision, found 0\.0"),
    "no number": (E4M3, float("nan"), "scales: expected positive numbers of single precision, found nan"),
    "too large": (E4M3, 1e39, r"scales: expected positive numbers of single precision, found 1e\+39"),
    "too small": (E4M3, 1e-46, "scales: expected positive numbers of single precision, found 1e-46"),
    "a layer without one": (E4M3, {0: 1.0, 2: 1.0}, "expected a scale for layer 1, found none"),
    "several": (E4M3, HALVES, r"expected one scale for layer 0, found \(4,\), and no scale_axis"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_scales_are_an_error_of_the_declaration(case: tuple[str, Scales, str]) -> None:
    dtype, scale, match = case
    layers = {layer: tuple(wrong_pool(dtype) for _ in "kv") for layer in range(LAYERS)}
    with pytest.raises(ConfigError, match=match):
        paged.gqa(layers, axes="nhd", num_kv_heads=HEADS, topology=Topology(), k_scale=scale, v_scale=1.0)


@pytest.mark.parametrize("given", [1.0, {0: [1.0] * 4, 1: [1.0] * 3, 2: [1.0] * 4}])
def test_scales_of_other_heads_are_an_error_of_the_declaration(given: Scales) -> None:
    layers = {layer: tuple(wrong_pool(E4M3) for _ in "kv") for layer in range(LAYERS)}
    with pytest.raises(ConfigError, match=r"expected 4 scales for layer [01], one for each kv_head, found \((3,)?\)"):
        paged.gqa(
            layers, axes="nhd", num_kv_heads=HEADS, topology=Topology(), k_scale=given, v_scale=given, scales_by_head=True
        )


def test_an_unknown_rounding_is_an_error_of_the_declaration() -> None:
    layers = {layer: tuple(wrong_pool(E4M3) for _ in "kv") for layer in range(LAYERS)}
    with pytest.raises(ConfigError, match="rounding: expected one of nearest, unbounded, toward_zero, found 'up'"):
        paged.gqa(layers, axes="nhd", num_kv_heads=HEADS, topology=Topology(), k_scale=1.0, v_scale=1.0, rounding="up")


def wrong_pool(dtype: str) -> RawTensor:
    pool = np.zeros((2, 4, HEADS, 6), np.uint16 if dtype == BF16 else np.uint8)
    return RawTensor(pool.ctypes.data, pool.shape, tuple(s // pool.itemsize for s in pool.strides), dtype, owner=pool)
