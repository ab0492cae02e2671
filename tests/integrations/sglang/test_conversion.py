"""One side keeps K and V in FP8: decode's pools hold the bits that SGLang's own `set_kv_buffer` stores for what prefill has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from disagg import KVManager, ModelId, Pages, PeerUnreachable, Topology, new_request_id
from disagg.integrations.sglang.layout import components
from disagg.integrations.sglang.pools import Pools, read_facts
from disagg.requests import Receiver, Sender
from tests.integrations.sglang.test_pools import RealMemory, config
from tests.integrations.sglang.test_special_pools import Rank

HEADS, DIM, LAYERS, PAGES = 4, 128, 2, 12
NUM_TOKENS = 2**16 // (HEADS * DIM)
"""Tokens that have all values of 16 bits between them."""
DEADLINE_S = 60.0
Scales = Mapping[int, tuple[float, float]]
NO_SCALES: Scales = {}


def pool(dtype: torch.dtype, tp: int = 1, page: int = 16) -> MHATokenToKVPool:
    return MHATokenToKVPool(size=page * PAGES, page_size=page, dtype=dtype, head_num=HEADS // tp, head_dim=DIM, device="cpu",
                            layer_num=LAYERS, enable_memory_saver=False)  # fmt: skip


def store(at: MHATokenToKVPool, where: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Have SGLang write K and V, `[token, head, dim]`, into every layer, V of other layers in another order of tokens."""
    for layer in range(LAYERS):
        at.set_kv_buffer(SimpleNamespace(layer_id=layer), where, k.roll(layer, 0).clone(), v.roll(-layer, 0).clone())


def values(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """All K that there are of 16 bits, and V of usual sizes. What `dtype` of 32 bits has of them, if it is that."""
    every = (
        torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16 if dtype is torch.float16 else torch.bfloat16)
    )
    some = torch.randn(2**16, generator=torch.Generator().manual_seed(5))
    return tuple(each.to(dtype).reshape(NUM_TOKENS, HEADS, DIM) for each in (every, some))


def slots(pages: torch.Tensor, page: int) -> torch.Tensor:
    """Where SGLang has the tokens of a request."""
    tokens = torch.arange(NUM_TOKENS)
    return pages[tokens // page] * page + tokens % page


class Side:
    """An instance: its pools, ranks, and managers."""

    def __init__(self, stack: ExitStack, name: str, dtype: torch.dtype, tp: int, page: int, scales: Scales) -> None:
        self.page, self.managers = page, list[KVManager]()
        self.pools = [pool(dtype, tp, page) for _ in range(tp)]
        for number, each in enumerate(self.pools):
            topology = Topology(tp=tp, tp_rank=number)
            memory: RealMemory = Rank(topology, Pools(kv=each, config=config(HEADS), kv_scales=scales))
            found = components(memory.kv_args(), read_facts(memory.pools, topology))
            leader = self.managers[0].address if self.managers else None
            manager = KVManager(name=name, topology=topology, components=found, model=ModelId("toy"), backend="local",
                                pack_below=4096, leader=leader)  # fmt: skip
            stack.callback(manager.close)
            self.managers.append(manager)

    def meet(self, other: str, address: str) -> None:
        for manager in self.managers:
            manager.add_peer(other, address=address)

    def rows(self, pages: torch.Tensor) -> dict[str, Pages]:
        return {"kv": Pages(pages[: -(-NUM_TOKENS // self.page)].numpy().astype(np.int32))}


def meet(stack: ExitStack, prefill: tuple[Any, ...], decode: tuple[Any, ...]) -> tuple[Side, Side]:
    one, other = Side(stack, "prefill", *prefill), Side(stack, "decode", *decode)
    one.meet("decode", other.managers[0].address)
    other.meet("prefill", one.managers[0].address)
    return one, other


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bits are equal, but of a NaN only that it is one."""
    is_number = ~expected.float().isnan()
    assert torch.equal(~found.float().isnan(), is_number)
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.itemsize]
    assert torch.equal(found.view(of_size)[is_number], expected.view(of_size)[is_number])


BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
PAIRS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "bf16 to e4m3": ((BF16, 1, 16, NO_SCALES), (E4M3, 1, 16, NO_SCALES)),
    "TP 2 to 1": ((BF16, 2, 16, NO_SCALES), (E4M3, 1, 32, NO_SCALES)),
    "TP 1 to 2": ((torch.float16, 1, 32, NO_SCALES), (E4M3, 2, 16, NO_SCALES)),
    "e5m2": ((BF16, 1, 16, NO_SCALES), (E5M2, 2, 16, NO_SCALES)),
    "from 32 bits": ((torch.float32, 2, 16, NO_SCALES), (E4M3, 1, 16, NO_SCALES)),
    "back": ((E4M3, 1, 16, NO_SCALES), (BF16, 2, 16, NO_SCALES)),
    "16 bits": ((BF16, 1, 16, NO_SCALES), (torch.float16, 1, 16, NO_SCALES)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_value(pair: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    with ExitStack() as stack:
        prefill, decode = meet(stack, *pair)
        generator = torch.Generator().manual_seed(1)
        here, there = (torch.randperm(PAGES, generator=generator) + 1 for _ in range(2))
        kept, k_and_v = pair[0][0], values(torch.bfloat16 if pair[0][0].itemsize == 1 else pair[0][0])
        heads = HEADS // len(prefill.pools)
        for number, each in enumerate(prefill.pools):
            own = (one[:, number * heads : (number + 1) * heads] for one in k_and_v)
            store(each, slots(here, prefill.page), *own)
        request = new_request_id()
        handles: list[Receiver | Sender] = [
            manager.receiver(
                request, peer="prefill", rows=decode.rows(there), need={"kv": (0, NUM_TOKENS)}, deadline_s=DEADLINE_S
            )
            for manager in decode.managers
        ]
        for manager in prefill.managers:
            sender = manager.sender(request, peer="decode", deadline_s=DEADLINE_S)
            sender.send(prefill.rows(here), tokens=(0, NUM_TOKENS))
            sender.finish()
            handles.append(sender)
        assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in handles)
        # What SGLang itself makes of the numbers, which those in 8 bits have been rounded to before.
        given = k_and_v if kept.itemsize > 1 else tuple(one.to(kept).float() for one in k_and_v)
        expected = pool(pair[1][0])
        store(expected, torch.arange(NUM_TOKENS), *given)
        for role in ("k_buffer", "v_buffer"):
            for layer in range(LAYERS):
                at = slots(there, decode.page)
                found = torch.cat([getattr(each, role)[layer][at] for each in decode.pools], dim=1)
                wanted = getattr(expected, role)[layer][torch.arange(NUM_TOKENS)]
                dtype = pair[1][0]
                same(found.view(dtype), wanted.view(dtype))


def check_refused(prefill: tuple[Any, ...], decode: tuple[Any, ...], match: str) -> None:
    with ExitStack() as stack:
        side, _ = meet(stack, prefill, decode)
        with pytest.raises(PeerUnreachable, match=match):
            side.managers[0].wait_ready("decode", timeout_s=2.0)


def check_ready(kept: tuple[Any, ...]) -> None:
    """Two sides that keep the same."""
    with ExitStack() as stack:
        side, _ = meet(stack, kept, kept)
        side.managers[0].wait_ready("decode", timeout_s=DEADLINE_S)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_sglang_would_round_twice_is_refused(dtype: torch.dtype) -> None:
    """It divides by a scale in the dtype of the model. Between two such servers bytes are copied."""
    halves: Scales = dict.fromkeys(range(LAYERS), (0.5, 0.25))
    only_itself = "expected the same dtype, since only the engine itself can make its"
    check_refused((BF16, 1, 16, NO_SCALES), (dtype, 1, 16, halves), only_itself)
    check_ready((dtype, 1, 16, halves))
    twice = r"layer 0: scales (0\.5 and 1\.0|1\.0 and 0\.5): numbers would be quantized twice"
    check_refused((dtype, 1, 16, halves), (dtype, 1, 16, NO_SCALES), twice)


def test_floats_that_sglang_has_divided_by_scales_are_not_converted() -> None:
    """It does so where the cache has another dtype than the model. Scales of a checkpoint are compared by name then."""
    halves: Scales = dict.fromkeys(range(LAYERS), (0.5, 0.25))
    check_refused((BF16, 1, 16, halves), (E4M3, 1, 16, NO_SCALES), "tensor 'k': dtype: ")
    check_ready((BF16, 1, 16, halves))


def test_two_formats_of_8_bits_are_refused() -> None:
    check_refused((E5M2, 1, 16, NO_SCALES), (E4M3, 1, 16, NO_SCALES), "numbers would be quantized twice")


def test_drafts_and_latents_are_not_converted() -> None:
    """A handshake compares their dtypes."""
    draft = SimpleNamespace(pools=(pool(BF16),), config=config(HEADS), tp=1, window=None)
    facts = read_facts(Pools(kv=pool(E4M3), drafts=draft, config=config(HEADS)), Topology())  # type: ignore[arg-type]
    assert facts.kv is not None
    assert facts.kv.kv_scales == {0: (1.0, 1.0), 1: (1.0, 1.0)}
    assert facts.drafts[0].kv is not None
    assert not facts.drafts[0].kv.kv_scales
