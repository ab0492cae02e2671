"""Memory of one SGLang rank in NumPy, laid out as SGLang's pools do it, with its `KVArgs`; and what a request must have there.

The contents of a request are whole arrays of the undivided model. Each rank's share is cut from them by plain slicing, which
shares no code with the package under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg import Topology
from disagg.integrations.sglang.facts import Buffer, DraftFacts, Facts, IndexFacts, PageFacts, SlotFacts
from disagg.state.declare import Block

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by its state. Layers are (pages, recurrent); `stages` gives the layers of each pipeline stage."""

    layers: tuple[int, ...] = (0, 1, 2)
    heads: int | None = 4  # None: latents
    dims: tuple[int, ...] = (8, 8)
    draft_layers: tuple[int, ...] = ()
    draft_heads: int | None = 4  # None: latents
    draft_dims: tuple[int, ...] = (8, 8)
    draft_window_layers: tuple[int, ...] = ()  # of one KV head
    draft_index_layers: tuple[int, ...] = ()
    window_layers: tuple[int, ...] = ()
    window_heads: int = 4
    window: int = 24
    windows: tuple[int, ...] = ()  # layers of `layers` that need no more than `window` tokens
    slot_layers: tuple[int, ...] = ()
    conv_blocks: tuple[Block, ...] = ()
    conv_axes: tuple[str, str] = ("channel", "width")
    temporal: tuple[int, int, int] = (4, 4, 4)
    index_layers: tuple[int, ...] = ()
    tokens_per_key: int = 1
    tail: int = 0

    def stage(self, layers: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
        """The layers of this pipeline stage: even cuts, the remainder to later stages."""
        low, more = divmod(max(self.all_layers) + 1, topology.pp)
        sizes = [low + (stage >= topology.pp - more) for stage in range(topology.pp)]
        start = sum(sizes[: topology.pp_rank])
        return tuple(layer for layer in layers if start <= layer < start + sizes[topology.pp_rank])

    def paged(self, topology: Topology) -> tuple[tuple[str, tuple[int, ...], int | None, tuple[int, ...]], ...]:
        """The components with pages of tokens: name, layers of this stage, KV heads and sizes. A draft is on the last stage."""
        drafts = (self.draft_layers, self.draft_window_layers) if topology.pp_rank == topology.pp - 1 else ((), ())
        return (
            ("kv", self.stage(self.layers, topology), self.heads, self.dims),
            ("draft", drafts[0], self.draft_heads, self.draft_dims),
            ("window", self.stage(self.window_layers, topology), self.window_heads, self.dims),
            ("draft_window", drafts[1], 1, self.draft_dims),
        )

    @property
    def all_layers(self) -> tuple[int, ...]:
        return self.layers + self.window_layers + self.slot_layers + self.index_layers


def share(total: int, topology: Topology) -> slice:
    """The heads of a rank: an equal part, or one head that several ranks hold."""
    if total >= topology.tp:
        size = total // topology.tp
        return slice(topology.tp_rank * size, (topology.tp_rank + 1) * size)
    head = topology.tp_rank // (topology.tp // total)
    return slice(head, head + 1)


def channels(blocks: tuple[Block, ...], topology: Topology) -> Array:
    """The channels of a fused axis that a rank has, block by block."""
    found, start = [], 0
    for block in blocks:
        units = np.arange(start, start + block.units * block.width).reshape(block.units, block.width)
        found.append(units[share(block.units, topology)].reshape(-1))
        start += block.size
    return np.concatenate(found)


def contents(model: Model, seed: int, num_tokens: int) -> dict[tuple[str, int, str], Array]:
    """A request's state, undivided, by component, layer and role. That of a component is the same in every model."""
    found: dict[tuple[str, int, str], Array] = {}

    def put(component: str, layers: tuple[int, ...], role: str, shape: tuple[int, ...], dtype: type = np.float32) -> None:
        for layer in layers:
            random = np.random.default_rng([seed, layer, *component.encode(), *role.encode()])
            values = random.standard_normal(shape) if dtype is np.float32 else random.integers(1, 255, shape)
            found[component, layer, role] = values.astype(dtype)

    for component, layers, heads, dims in model.paged(Topology()):
        for role, dim in zip(("latent",) if heads is None else ("k", "v"), dims, strict=False):
            put(component, layers, role, (num_tokens, dim) if heads is None else (num_tokens, heads, dim))
    if model.slot_layers:
        sizes = {"channel": sum(block.size for block in model.conv_blocks), "width": 3}
        put("ssm", model.slot_layers, "conv", (sizes[model.conv_axes[0]], sizes[model.conv_axes[1]]))
        put("ssm", model.slot_layers, "temporal", model.temporal)
    for index, layers in (("index", model.index_layers), ("draft_index", model.draft_index_layers)):
        keys = num_tokens // model.tokens_per_key
        put(index, layers, "key", (keys, 128), np.uint8)
        put(index, layers, "scale", (keys, 4), np.uint8)
        for role in ("key", "score") if model.tail else ():
            put(f"{index}_tail", layers, role, (num_tokens, 256), np.uint8)
    return found


@dataclass
class Request:
    """Where one request is on one rank, in SGLang's terms: page ids for all its tokens, a row of the request pool."""

    num_tokens: int
    pages: Array
    window_pages: Array
    slot: int
    prefix: int = 0


@dataclass
class Memory:
    """One rank's pools."""

    model: Model
    topology: Topology
    page_size: int = 16
    num_pages: int = 64
    num_slots: int = 8
    buffers: dict[tuple[str, int, str], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, rank = self.model, self.topology
        for component, layers, heads, dims in model.paged(rank):
            for layer in layers:
                if heads is None:
                    self._add(component, layer, "latent", (self.num_pages * self.page_size, dims[0]))
                    continue
                local = len(range(*share(heads, rank).indices(heads)))
                for role, dim in zip("kv", dims, strict=True):
                    self._add(component, layer, role, (self.num_pages * self.page_size, local, dim))
        for layer in model.stage(model.slot_layers, rank):
            sizes = {"channel": len(channels(model.conv_blocks, rank)), "width": 3}
            self._add("ssm", layer, "conv", (self.num_slots, sizes[model.conv_axes[0]], sizes[model.conv_axes[1]]))
            heads, *rest = model.temporal
            self._add("ssm", layer, "temporal", (self.num_slots, heads // rank.tp, *rest))
        for index, layers in (("index", model.stage(model.index_layers, rank)), ("draft_index", model.draft_index_layers)):
            for layer in layers:
                keys = self.page_size // model.tokens_per_key
                self._add(index, layer, "page", (self.num_pages, keys * 132), np.uint8)
                for role in ("key", "score") if model.tail else ():
                    self._add(f"{index}_tail", layer, role, (self.num_slots, model.tail, 256), np.uint8)

    def _add(self, component: str, layer: int, role: str, shape: tuple[int, ...], dtype: type = np.float32) -> None:
        self.buffers[component, layer, role] = np.zeros(shape, dtype)

    # -- what SGLang says of it --------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """The facts of this rank."""
        model, rank = self.model, self.topology

        def index_facts(layers: tuple[int, ...]) -> IndexFacts | None:
            if not layers:
                return None
            return IndexFacts(layers=layers, key_dim=128, tokens_per_key=model.tokens_per_key, tail=model.tail)

        pages = {
            name: PageFacts(layers=layers, dtype="float32", dims=dims, num_kv_heads=heads) if layers else None
            for name, layers, heads, dims in model.paged(rank)
        }
        draft = DraftFacts(
            kv=pages["draft"],
            buffers=self._pages_of("draft"),
            window_kv=pages["draft_window"],
            window_buffers=self._pages_of("draft_window"),
            window=model.window,
            index=index_facts(model.draft_index_layers),
        )

        slots = []
        for role in ("conv", "temporal"):
            for layer in model.stage(model.slot_layers, rank):
                if role == "conv":
                    sizes = {"channel": len(channels(model.conv_blocks, rank)), "width": 3}
                    shape = tuple(sizes[axis] for axis in model.conv_axes)
                    slots.append(SlotFacts(role=role, layer=layer, axes=model.conv_axes, shape=shape, dtype="float32",
                                           sharded="channel", blocks=model.conv_blocks))  # fmt: skip
                else:
                    heads, *rest = model.temporal
                    slots.append(SlotFacts(role=role, layer=layer, axes=("head", "row", "column"), dtype="float32",
                                           shape=(heads // rank.tp, *rest), sharded="head",
                                           blocks=(Block(heads, 1),)))  # fmt: skip
        return Facts(
            topology=rank,
            kv=pages["kv"],
            drafts=(draft,) if draft.kv or draft.window_kv else (),
            window_kv=pages["window"],
            window=model.window,
            windows=dict.fromkeys(model.windows, model.window),
            by_layer=bool(model.windows),
            slots=tuple(slots),
            index=index_facts(model.stage(model.index_layers, rank)),
        )

    def stages(self) -> list[Memory]:
        """The ranks at this one's place in every pipeline stage."""
        stages = (replace(self.topology, pp_rank=stage) for stage in range(self.topology.pp))
        return [self if each == self.topology else Memory(self.model, each, page_size=self.page_size) for each in stages]

    def kv_args(self, **changes: Any) -> SimpleNamespace:
        """`KVArgs` over these pools: K of all layers, then V, then draft layers; states in SGLang's order."""
        kv, draft, index, tails = (
            [buffer for name in names for role in roles for buffer in self._buffers(name, role)]
            for names, roles in (
                (("kv",), ("latent", "k", "v")),
                (("draft",), ("latent", "k", "v")),
                (("index", "draft_index"), ("page",)),
                (("index_tail", "draft_index_tail"), ("key", "score")),
            )
        )
        args = SimpleNamespace(
            page_size=self.page_size,
            kv_data_ptrs=[b.ctypes.data for b in kv + draft],
            kv_data_lens=[b.nbytes for b in kv + draft],
            kv_item_lens=[b[0].nbytes * self.page_size for b in kv + draft],
            num_draft_entries=len(draft),
            state_types=[], state_data_ptrs=[], state_data_lens=[], state_item_lens=[], state_dim_per_tensor=[],
        )  # fmt: skip
        for kind, buffers, rows in (
            ("swa", self._buffers("window", "k") + self._buffers("window", "v"), self.page_size),
            ("mamba", self._buffers("ssm", "conv") + self._buffers("ssm", "temporal"), 1),
            ("dsa", index, 1),
            ("dsa_tail", tails, 1),
        ):
            if buffers:
                args.state_types.append(kind)
                args.state_data_ptrs.append([b.ctypes.data for b in buffers])
                args.state_data_lens.append([b.nbytes for b in buffers])
                args.state_item_lens.append([b[0].nbytes * rows for b in buffers])
                args.state_dim_per_tensor.append([b.shape[1] for b in buffers])
        return SimpleNamespace(**{**vars(args), **changes})

    def _buffers(self, component: str, role: str) -> list[Array]:
        return [buffer for (name, _, each), buffer in self.buffers.items() if (name, each) == (component, role)]

    def _pages_of(self, component: str) -> tuple[Buffer, ...]:
        """The buffers of a component with pages of tokens, as a pool of SGLang lists them."""
        found = [buffer for role in ("latent", "k", "v") for buffer in self._buffers(component, role)]
        return tuple(Buffer(b.ctypes.data, b.nbytes, b[0].nbytes * self.page_size) for b in found)

    # -- a request ---------------------------------------------------------------------------------------------------

    def kv_list(self, request: Request, start: int, stop: int) -> Array:
        """The page ids that the scheduler sends for tokens `[start, stop)`."""
        return request.pages[start // self.page_size : -(-stop // self.page_size)].astype(np.int32)

    def state_lists(self, request: Request) -> list[Any]:
        """One list for each kind of state, as the scheduler makes them for the last chunk."""
        model, n, size = self.model, request.num_tokens, self.page_size
        found: list[Any] = []
        for kind in self.kv_args().state_types:
            if kind == "mamba":
                found.append([np.array(request.slot)])
            elif kind in ("swa", "block_scale_swa"):
                start = max(request.prefix, n - model.window) // size
                found.append(request.window_pages[start : -(-n // size)].astype(np.int32))
            elif kind in ("block_scale", "qsa_compressed", "minimax_dense_kv"):
                found.append(request.pages[: -(-n // size)].astype(np.int32))
            elif kind == "qsa_pending":
                found.append(np.array([request.slot], np.int32))
            elif kind in ("dsa", "minimax_index_k"):
                found.append(request.pages[request.prefix // size : -(-n // size)].astype(np.int32))
            else:
                live = n % model.tokens_per_key
                start = (n - live) % model.tail
                first = min(live, model.tail - start)
                found.append([request.slot, start, first, 0, live - first, model.tail] if live else [])
        return found

    def views(self, request: Request, whole: dict[tuple[str, int, str], Array]) -> list[tuple[str, Array, Array, Any]]:
        """For every piece of a request that decode needs: its name, what it must be, the buffer, and the index there."""
        found: list[tuple[str, Array, Array, Any]] = []
        n, rank, model = request.num_tokens, self.topology, self.model
        for (component, layer, role), buffer in self.buffers.items():
            name = f"{component} layer {layer} {role}"
            if component == "ssm":
                part = whole[component, layer, role]
                if role == "temporal":
                    part = part[share(model.temporal[0], rank)]
                else:
                    part = np.take(part, channels(model.conv_blocks, rank), axis=model.conv_axes.index("channel"))
                found.append((name, part, buffer, (request.slot,)))
                continue
            kind = component.removeprefix("draft_")
            start = {
                "window": max(request.prefix, n - model.window),
                "index_tail": n - n % model.tokens_per_key,
            }.get(kind, request.prefix)
            if component == "kv" and layer in model.windows:
                start = max(request.prefix, n - model.window)
            tokens = np.arange(start, n)
            if kind == "index":
                keys = np.arange(request.prefix // model.tokens_per_key, n // model.tokens_per_key)
                per_page = self.page_size // model.tokens_per_key
                page, at = request.pages[keys // per_page], keys % per_page
                for half, first, width in (("key", 0, 128), ("scale", per_page * 128, 4)):
                    columns = first + at[:, None] * width + np.arange(width)
                    found.append((f"{name} {half}", whole[component, layer, half][keys], buffer, (page[:, None], columns)))
            elif kind == "index_tail":
                found.append((name, whole[component, layer, role][tokens], buffer, (request.slot, tokens % model.tail)))
            else:
                pages = request.window_pages if kind == "window" else request.pages
                heads = {name: heads for name, _, heads, _ in model.paged(rank)}[component]
                part = whole[component, layer, role][tokens]
                if heads is not None:
                    part = part[:, share(heads, rank)]
                found.append(
                    (name, part, buffer, (pages[tokens // self.page_size] * self.page_size + tokens % self.page_size,))
                )
        return found

    def fill(self, request: Request, seed: int) -> None:
        """Write the request's state, as a prefill engine computes it."""
        for _, value, buffer, where in self.views(request, contents(self.model, seed, request.num_tokens)):
            buffer[where] = value

    def differences(self, request: Request, seed: int) -> list[str]:
        """The pieces that are not what they must be."""
        views = self.views(request, contents(self.model, seed, request.num_tokens))
        return [name for name, value, buffer, where in views if not np.array_equal(buffer[where], value)]
