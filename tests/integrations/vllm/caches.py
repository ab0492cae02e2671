"""Servers of vLLM without a model: caches that vLLM's own code describes, groups, allocates and divides into views.

A layer's content is random bytes for each token and head of the whole model. vLLM's addressing says where they lie on each
rank: `Server.write` puts them there, and `move` carries out this library's plans from one server to another.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from vllm.config import SpeculativeConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from disagg.integrations.vllm.drafts import Drafts
from disagg.integrations.vllm.groups import Group, Kind, read_groups
from disagg.integrations.vllm.layout import Cache, rank_topology, read_caches
from disagg.layout.binding import bind
from disagg.layout.election import elect
from disagg.layout.plan import make_plan
from disagg.layout.tables import LayoutTable, layout_table

if not hasattr(kv_cache_utils, "get_kv_cache_groups"):  # they have moved in vLLM 0.33
    from vllm.v1.core import kv_cache_planning as kv_cache_utils

Cells = Mapping[str, torch.Tensor]
"""The bytes of a cache, as `[page, position, head, byte]` or, for a recurrent state, `[page, ...]` with its own axes."""

Ints = np.ndarray[Any, Any]

Part = Callable[[int, int], tuple[Any, ...]]
"""The index of the part of a whole model's array that a rank has, given its number and the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One cache of a model.

    `spec` is vLLM's, given the number of ranks and the tokens per block. `cells` finds its bytes in vLLM's view of it, as the
    kernels do; `impl` makes the object that calls them, if it matters. `heads` are those of the whole model, or 0 if every rank
    has the same. `parts` are the arrays of a recurrent state over all ranks, and the part of a rank. Positions stand for
    `granule` tokens each.
    """

    name: str
    spec: Callable[[int, int], KVCacheSpec]
    cells: Callable[[torch.Tensor, Any], Cells]
    heads: int = 0
    granule: int = 1
    parts: Mapping[str, tuple[tuple[int, ...], Part]] = field(default_factory=dict)
    dtype: str = "auto"
    backend: str = "FLASH_ATTN"
    impl: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Request:
    """A request's tokens, and its blocks by group. Decode needs the tokens from `start` on."""

    seed: int
    num_tokens: int
    blocks: tuple[list[int], ...]
    start: int = 0


class Rank:
    """The memory of one worker."""

    def __init__(self, server: Server, number: int) -> None:
        options = server.options
        self.server, self.number = server, number
        self.views = allocate_kv_cache(server.kv, torch.device("cpu"), server.layout, options.get("kernel_blocks"))
        self.memory = next(iter(self.views.values())).untyped_storage()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(self.memory)
        self.bytes.copy_(torch.randint(0, 256, self.bytes.shape, dtype=torch.uint8))
        self.config = _config(server)
        self.topology = rank_topology(self.config.parallel_config, tp_rank=number, pp_rank=0)
        drafts = Drafts(self.config, server.kv)
        self.caches: tuple[Cache, ...] = read_caches(
            self.config, server.kv, self.views, self.topology, model=server.model, drafts=drafts, from_tp=lambda own: [own]
        )

    def write(self, request: Request, needs: Sequence[tuple[int, int]]) -> None:
        """Put a request's content where vLLM's kernels have it: the tokens of `needs` by group."""
        for group in self.server.groups:
            for name in group.specs:
                self._write(self.server.layers[name], group, request, needs[group.index])

    def _write(self, layer: Layer, group: Group, request: Request, need: tuple[int, int]) -> None:
        view, spec = self.views[layer.name], group.specs[layer.name]
        cells, ranks = layer.cells(view, spec), self.server.options["tp"]
        blocks = request.blocks[group.index]
        if isinstance(spec, MambaSpec):
            for key, cell in cells.items():
                shape, part = layer.parts[key]
                whole = _content(request.seed, f"{layer.name} {key}", (*shape, cell.element_size()))
                mine = torch.from_numpy(np.ascontiguousarray(whole[part(self.number, ranks)]))
                cell.view(torch.uint8)[blocks[-1]] = mine.reshape(*mine.shape[:-2], -1)
            return
        heads = _heads(layer.heads, self.number, ranks)
        dcp = self.server.options["dcp"] if spec.dcp_sharded else 1
        interleave, per_block = self.server.options["interleave"], view.shape[0] // self.server.kv.num_blocks
        positions = np.arange(-(-need[0] // layer.granule), need[1] // layer.granule)
        block_size = spec.block_size // layer.granule
        mine, slots = _slots(positions, blocks, block_size, dcp, self.number % dcp, interleave)
        pages, offsets = (torch.from_numpy(part) for part in np.divmod(slots, block_size // per_block))
        for key, cell in cells.items():
            size = layer.heads or 1, cell.shape[-1]
            whole = _content(request.seed, f"{layer.name} {key}", (request.num_tokens // layer.granule, *size))
            cell[pages, offsets] = torch.from_numpy(whole[mine, heads])


class Server:
    """The ranks of one server. `options` are `tp`, `dcp`, `interleave`, `block_size`, `layout`, `num_blocks`, `hybrid`,
    `dtype` (the model's), `kernel_blocks`, by group, and `draft`, the fields of the draft model's configuration: then layers
    after the model's own draft.
    """

    def __init__(self, layers: Sequence[Layer], *, model: Mapping[str, Any], **options: Any) -> None:
        self.options = {"tp": 1, "dcp": 1, "interleave": 1, "block_size": 16, "layout": "LBNHC", "num_blocks": 24, **options}
        self.layers = {layer.name: layer for layer in layers}
        self.model = model
        self.layout = KVCacheLayout[self.options["layout"]]
        config = _config(self)
        specs = {layer.name: layer.spec(self.options["tp"], self.options["block_size"]) for layer in layers}
        groups = kv_cache_utils.get_kv_cache_groups(config, specs)
        self.kv = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 40)
        self.groups = read_groups(self.kv, dcp=self.options["dcp"])
        self.ranks = [Rank(self, number) for number in range(self.options["tp"])]
        components = [cache.component for cache in self.ranks[0].caches]
        self.table: LayoutTable = layout_table(self.ranks[0].topology, [component.layouts for component in components])

    @property
    def window_page(self) -> int:
        sizes = [group.block_size for group in self.groups if group.window is not None]
        return int(np.gcd.reduce(sizes)) if sizes else 1

    def request(self, num_tokens: int, *, seed: int, start: int = 0) -> Request:
        """A request with blocks that no other group has. Windows have none for tokens that are not needed."""
        free = list(np.random.default_rng(seed).permutation(np.arange(1, self.kv.num_blocks)))
        blocks = []
        for group in self.groups:
            if group.kind is Kind.STATE:
                blocks.append([int(free.pop())])
                continue
            first = group.needed(0, num_tokens)[0] // group.block_size
            count = -(-num_tokens // group.block_size)
            blocks.append([0] * first + [int(free.pop()) for _ in range(count - first)])
        return Request(seed, num_tokens, tuple(blocks), start)


def move(prefill: Server, decode: Server, at: Request, to: Request, *, chunk: int | None = None) -> None:
    """Carry out the plans between all ranks, in chunks of tokens as prefill computes them."""
    election = elect(prefill.table, decode.table)
    needs = needed(prefill, decode, to)
    for source in prefill.ranks:
        for destination in decode.ranks:
            sides = [
                (rank.topology.group_rank, server.table, {c.name: c.component.placement for c in rank.caches})
                for server, rank in ((prefill, source), (decode, destination))
            ]
            plan = make_plan(election, source=sides[0], destination=sides[1])  # type: ignore[arg-type]
            theirs = {cache.name: cache for cache in destination.caches}
            for cache in source.caches:
                if cache.name in plan.components:
                    there = theirs[cache.name]
                    rows, need = there.rows(to.blocks[there.group.index]), needs[there.group.index]
                    for start, stop in _chunks(cache, need, chunk):
                        blocks = at.blocks[cache.group.index]
                        chosen = cache.group.covering(blocks, start, stop) if cache.group.is_incremental else blocks
                        here = cache.rows(chosen, start=start if cache.group.is_incremental else 0)
                        copies = bind(plan.components[cache.name], source=here, destination=rows, tokens=(start, stop))
                        for read, put, nbytes in zip(copies.source, copies.destination, copies.nbytes, strict=True):
                            ctypes.memmove(int(put), int(read), int(nbytes))


def needed(prefill: Server, decode: Server, request: Request) -> list[tuple[int, int]]:
    """The tokens that decode needs, by its groups."""
    page = prefill.window_page
    return [group.needed(request.start, request.num_tokens, window_page=page) for group in decode.groups]


def check_move(prefill: Server, decode: Server, *, num_tokens: int, start: int = 0, chunk: int | None = None) -> None:
    """Every byte of decode's memory is as vLLM's own kernels would have written it, and no other byte has changed."""
    seed = 2 * (num_tokens * num_tokens + start)
    at, to = prefill.request(num_tokens, seed=seed), decode.request(num_tokens, seed=seed + 1, start=start)
    to = Request(at.seed, to.num_tokens, to.blocks, to.start)
    everything = [group.needed(0, num_tokens) for group in prefill.groups]
    whole = [(first - first % group.block_size, stop) for group, (first, stop) in zip(prefill.groups, everything, strict=True)]
    for rank in prefill.ranks:
        rank.write(at, whole)
    before = [rank.bytes.clone() for rank in decode.ranks]
    for rank in decode.ranks:
        rank.write(to, needed(prefill, decode, to))
    expected = [rank.bytes.clone() for rank in decode.ranks]
    for rank, old in zip(decode.ranks, before, strict=True):
        rank.bytes.copy_(old)
    assert not all(map(torch.equal, expected, before)), "nothing is to be moved"
    move(prefill, decode, at, to, chunk=chunk)
    for rank, want in zip(decode.ranks, expected, strict=True):
        wrong = (rank.bytes != want).nonzero()
        assert not len(wrong), f"rank {rank.number}: {len(wrong)} bytes differ, the first at {int(wrong[0])}"


def groups_of_stage(server: Server, specs: Mapping[str, KVCacheSpec]) -> list[Any]:
    """VLLM's groups of a pipeline stage with these layers."""
    return list(kv_cache_utils._project_kv_cache_groups_to_worker(server.kv.kv_cache_groups, specs))


def _chunks(cache: Cache, need: tuple[int, int], chunk: int | None) -> list[tuple[int, int]]:
    if chunk is None or not cache.group.is_incremental:
        return [need]
    return list(itertools.pairwise([*range(need[0], need[1], chunk), need[1]]))


def _content(seed: int, what: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, zlib.crc32(what.encode())]).integers(0, 256, tuple(shape), dtype=np.uint8)


def _heads(total: int, rank: int, ranks: int) -> slice:
    """The heads of a rank, as vLLM's `QKVParallelLinear` divides them."""
    if not total:
        return slice(0, 1)
    if ranks >= total:
        return slice(rank // (ranks // total), rank // (ranks // total) + 1)
    return slice(rank * (total // ranks), (rank + 1) * (total // ranks))


def _slots(positions: Ints, blocks: Sequence[int], block_size: int, dcp: int, rank: int, interleave: int) -> tuple[Ints, Ints]:
    """The positions that a rank of a DCP group has, and where vLLM's `ComputeSlotMappingKernel` puts them."""
    block, offset = np.divmod(positions, block_size * dcp)
    mine = offset // interleave % dcp == rank
    block, offset = block[mine], offset[mine]
    slots = np.asarray(blocks)[block] * block_size + offset // (dcp * interleave) * interleave + offset % interleave
    return positions[mine], slots


def _config(server: Server) -> Any:
    """The parts of vLLM's configuration that its own functions and the connector read."""
    options, model = server.options, server.model
    text = model.get("text_config", model)
    scaled = {"_k_scale": torch.tensor(1.0), "_v_scale": torch.tensor(1.0)}
    layers = {
        layer.name: SimpleNamespace(
            **({} if layer.name.endswith("swa_cache") else scaled | {"kv_cache_dtype": layer.dtype}),  # V4's has none
            get_attn_backend=lambda layer=layer: SimpleNamespace(get_name=lambda: layer.backend),
            impl=layer.impl and layer.impl(),
        )
        for layer in server.layers.values()
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="model",
            hf_text_config=SimpleNamespace(to_dict=lambda: text),
            get_total_num_hidden_layers=lambda: text["num_hidden_layers"],
            get_total_num_kv_heads=lambda: text.get("num_key_value_heads", 1),
            dtype=options.get("dtype", torch.bfloat16),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=options["tp"],
            pipeline_parallel_size=1,
            decode_context_parallel_size=options["dcp"],
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=options["interleave"],
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not options.get("hybrid", True)),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            block_size=options["block_size"],
            cache_dtype=next(iter(server.layers.values())).dtype,
            get_resolved_kv_cache_layout=lambda: server.layout,
            num_gpu_blocks_override=options["num_blocks"],
            prefix_cache_retention_interval=None,
        ),
        speculative_config=_speculation(options),
    )


def _speculation(options: Mapping[str, Any]) -> Any:
    draft = options.get("draft")
    if draft is None:
        return None
    config = transformers.PreTrainedConfig(**draft)
    model = SimpleNamespace(
        model="no folder",
        revision=None,
        hf_config=config,
        hf_text_config=config,
        max_model_len=512,
        using_transformers_backend=lambda: False,
        get_total_num_kv_heads=lambda: draft.get("num_key_value_heads", 1),
    )
    fields = {
        "method": "mtp",
        "num_speculative_tokens": 1,
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "draft_parallel_config": SimpleNamespace(tensor_parallel_size=options["tp"]),
        "draft_model_config": model,
    }
    found = object.__new__(SpeculativeConfig)
    for name, value in fields.items():
        object.__setattr__(found, name, value)
    return found
