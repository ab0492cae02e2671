"""Kinds of layers: their names, and the rules that give each layer of a model its kind, as in transformers 5.23
(`configuration_*.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from disagg.models.fields import MAX_LAYERS, Fields

FULL, SLIDING, LINEAR, HYBRID = "full_attention", "sliding_attention", "linear_attention", "hybrid"
INDEXED, M3_SPARSE = "indexed_attention", "minimax_m3_sparse"
COMPRESSED, HEAVILY_COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
MLP, MOE = "mlp", "moe"
CONV, CHUNKED = "conv", "chunked_attention"
REUSED = "reused"
INDEX_REUSED, KV_REUSED = "reused_index", "reused_kv"
"""Layers that read another layer's state: all of it, its choice of tokens, or all but its index keys."""

_OLD_NAMES = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}
"""Names in files from before transformers settled on the names above."""
_NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}

LayerRule = Callable[[Fields, int], Sequence[str]]
Sharing = Callable[[Fields, Sequence[str]], Sequence[str]]
"""Replaces kinds by `REUSED` and the like where layers read another's state."""
ListReader = Callable[[Fields], list[str] | None]
"""`None` if a file lists no kinds."""


def current_names(kinds: Iterable[str]) -> list[str]:
    return [_OLD_NAMES.get(kind, kind) for kind in kinds]


def listed(fields: Fields) -> list[str] | None:
    kinds = fields.items("layer_types", "layers_block_type", of=str)
    return None if kinds is None else current_names(kinds)


def listed_or_letters(fields: Fields) -> list[str] | None:
    return listed(fields) or letters(fields, "hybrid_override_pattern")


def letters(fields: Fields, key: str) -> list[str] | None:
    """Nemotron-H: one letter per layer."""
    pattern = fields.raw(key)
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_NEMOTRON_LETTERS):
        raise fields.error(key, f"letters of {''.join(_NEMOTRON_LETTERS)}", pattern)
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def must_be_listed(fields: Fields, _: int) -> Sequence[str]:
    raise fields.error("layer_types", "a list of kinds of layers", None)


def every_layer(kind: str) -> LayerRule:
    return lambda _, num_layers: [kind] * num_layers


def alternating(first: str, second: str) -> LayerRule:
    return lambda _, num_layers: [second if layer % 2 else first for layer in range(num_layers)]


def gemma2(fields: Fields, num_layers: int) -> Sequence[str]:
    """Published files name the window twice."""
    window, again = fields.size("sliding_window"), fields.raw("sliding_window_size")
    if again not in (None, window):
        raise fields.error("sliding_window_size", f"{window}, as sliding_window", again)
    return alternating(SLIDING, FULL)(fields, num_layers)


def full_every_nth(other: str, *, default: int, key: str | None = None) -> LayerRule:
    """Full attention in every `default`-th layer, or as often as the field `key` says."""

    def rule(fields: Fields, num_layers: int) -> Sequence[str]:
        every = default if key is None else fields.size(key, default=default)
        return [other if (layer + 1) % every else FULL for layer in range(num_layers)]

    return rule


def by_position(full: Callable[[int, int], bool], other: str = SLIDING) -> LayerRule:
    return lambda _, num_layers: [FULL if full(layer, num_layers) else other for layer in range(num_layers)]


def gpt_neo(fields: Fields, num_layers: int) -> Sequence[str]:
    """GPT-Neo: local layers attend to `window_size` tokens, but transformers keeps all."""
    fields.raw("window_size")
    return [FULL] * num_layers


def exaone(fields: Fields, num_layers: int) -> Sequence[str]:
    """Exaone 4: full attention in every `sliding_window_pattern`-th layer; in all if `sliding_window` is null."""
    if fields.has("sliding_window") and fields.raw("sliding_window") is None:
        fields.kinds_are_settled()
        return [FULL] * num_layers
    return full_every_nth(SLIDING, key="sliding_window_pattern", default=4)(fields, num_layers)


def window_if_set(fields: Fields, num_layers: int) -> Sequence[str]:
    return [FULL if fields.raw("sliding_window") is None else SLIDING] * num_layers


def mistral(fields: Fields, num_layers: int) -> Sequence[str]:
    """Mistral: all layers have the window, or none has. Transformers takes a file without the field for a window of 4096,
    other readers for no window, so it must be present.
    """
    if not fields.has("sliding_window"):
        raise fields.error("sliding_window", "a number of tokens, or null", None)
    return window_if_set(fields, num_layers)


def upper_windows(fields: Fields, num_layers: int) -> Sequence[str]:
    """Qwen2, Qwen3: windows in the layers from `max_window_layers` on, if they are used."""
    if not _windows_used(fields):
        return [FULL] * num_layers
    first = fields.size("max_window_layers", least=0, most=MAX_LAYERS)
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def windows_from(fields: Fields, num_layers: int) -> Sequence[str]:
    """Dots 1: the same, if `sliding_window` is set."""
    first = fields.size("max_window_layers", least=0, most=MAX_LAYERS)
    windowed = fields.raw("sliding_window") is not None
    return [SLIDING if windowed and layer >= first else FULL for layer in range(num_layers)]


def lower_windows(fields: Fields, num_layers: int) -> Sequence[str]:
    """Qwen2-MoE: windows in every other layer below `max_window_layers`, if they are used."""
    if not _windows_used(fields):
        return [FULL] * num_layers
    end = fields.size("max_window_layers", least=0, most=MAX_LAYERS)
    return [FULL if layer % 2 or layer >= end else SLIDING for layer in range(num_layers)]


def listed_if_windows(fields: Fields, num_layers: int) -> Sequence[str]:
    """SmolLM3: the file must list the kinds if windows are used."""
    return must_be_listed(fields, num_layers) if _windows_used(fields) else [FULL] * num_layers


def all_windows_or_none(fields: Fields, num_layers: int) -> Sequence[str]:
    """Qwen3-MoE: windows in all layers, if they are used."""
    return [SLIDING if _windows_used(fields) else FULL] * num_layers


def _windows_used(fields: Fields) -> bool:
    used = fields.flag("use_sliding_window")
    if used and not fields.has("sliding_window"):
        raise fields.error("sliding_window", "a number of tokens, or null", None)
    return fields.raw("sliding_window") is not None and used


def kimi(fields: Fields, num_layers: int) -> Sequence[str]:
    """Kimi-Linear: two lists of layers, which count from 1 and together name each layer once."""
    linear = fields.section("linear_attn_config")
    full, kda = linear.items("full_attn_layers", of=int), linear.items("kda_layers", of=int)
    if full is None or kda is None or sorted(full + kda) != list(range(1, num_layers + 1)):
        raise linear.error("kda_layers", f"each of 1 to {num_layers} once in it or in full_attn_layers", (full, kda))
    return [FULL if layer in set(full) else LINEAR for layer in range(1, num_layers + 1)]


def bamba(fields: Fields, num_layers: int) -> Sequence[str]:
    chosen = fields.items("attn_layer_indices", of=int) or []
    if any(not 0 <= layer < num_layers for layer in chosen):
        raise fields.error("attn_layer_indices", f"layers 0 to {num_layers - 1}", chosen)
    return [FULL if layer in chosen else LINEAR for layer in range(num_layers)]


def jamba(fields: Fields, num_layers: int) -> Sequence[str]:
    period = fields.size("attn_layer_period", most=MAX_LAYERS)
    offset = fields.size("attn_layer_offset", least=0, most=period - 1)
    return [FULL if layer % period == offset else LINEAR for layer in range(num_layers)]


def zamba(fields: Fields, num_layers: int) -> Sequence[str]:
    period = fields.size("attn_layer_period", most=MAX_LAYERS)
    offset = fields.size("attn_layer_offset", least=0, most=period - 1)
    inner = [HYBRID if layer % period == offset else LINEAR for layer in range(max(num_layers - 3, 0))]
    return [LINEAR, LINEAR, HYBRID, *inner][:num_layers]


def olmo_hybrid(_: Fields, num_layers: int) -> Sequence[str]:
    return [FULL if layer % 4 == 3 or (num_layers < 4 and layer == num_layers - 1) else LINEAR for layer in range(num_layers)]


def llama4(fields: Fields, num_layers: int) -> Sequence[str]:
    """Llama 4: layers with rotary embeddings attend within chunks."""
    every = fields.size("no_rope_layer_interval", default=4)
    rotary = fields.items("no_rope_layers", of=int) or [(layer + 1) % every for layer in range(num_layers)]
    return [CHUNKED if is_rotary else FULL for is_rotary in rotary]


def lfm2(fields: Fields, num_layers: int) -> Sequence[str]:
    chosen = fields.items("full_attn_idxs", of=int)
    return [FULL if chosen is None or layer in chosen else CONV for layer in range(num_layers)]


def lfm3(_: Fields, num_layers: int) -> Sequence[str]:
    order = {0: SLIDING, 2: FULL}
    return [order.get(layer % 4, CONV) if layer else CONV for layer in range(num_layers)]


def mimo(fields: Fields, num_layers: int) -> Sequence[str]:
    """MiMo-V2: windows where `hybrid_layer_pattern` has a 1; without it, except in layer 0 and every sixth one."""
    pattern = fields.items("hybrid_layer_pattern", of=int)
    fields.raw("attention_chunk_size")  # in published files; the model does not use it
    if pattern is None:
        return [SLIDING if layer and (layer + 1) % 6 else FULL for layer in range(num_layers)]
    return [SLIDING if windowed else FULL for windowed in pattern]


def minimax_m3(fields: Fields, num_layers: int) -> Sequence[str]:
    sparse = fields.section("sparse_attention_config")
    chosen = sparse.items("sparse_attention_freq", of=int) or [0] * num_layers
    if any(chosen) and not sparse.flag("use_sparse_attention", default=True):
        raise sparse.error("sparse_attention_freq", "no sparse layers with use_sparse_attention=false", chosen)
    return [M3_SPARSE if is_sparse else FULL for is_sparse in chosen]


def deepseek_v4(fields: Fields, num_layers: int) -> Sequence[str]:
    """DeepSeek-V4: by compression ratio, else in transformers' default order. Files list the ratios of draft layers too."""
    ratios = fields.items("compress_ratios", of=int)
    if ratios is None:
        inner = [COMPRESSED if layer % 2 else HEAVILY_COMPRESSED for layer in range(max(num_layers - 2, 0))]
        return [HEAVILY_COMPRESSED] * min(num_layers, 2) + inner
    by_ratio = {0: SLIDING, 4: COMPRESSED, 128: HEAVILY_COMPRESSED}
    if any(ratio not in by_ratio for ratio in ratios) or len(ratios) < num_layers:
        raise fields.error("compress_ratios", f"0, 4 or 128 for each of {num_layers} layers", ratios)
    return [by_ratio[ratio] for ratio in ratios[:num_layers]]


def none_shared(_: Fields, kinds: Sequence[str]) -> Sequence[str]:
    return kinds


def last_share(fields: Fields, kinds: Sequence[str]) -> Sequence[str]:
    """Gemma 3n: the last `num_kv_shared_layers` layers read the KV of the last layer of their kind before them."""
    shared = fields.size("num_kv_shared_layers", default=0, least=0, most=len(kinds) - 1)
    first = len(kinds) - shared
    if set(kinds[first:]) - set(kinds[:first]):
        raise fields.error("num_kv_shared_layers", f"a layer of each kind among the {first} that keep their own KV", shared)
    return [*kinds[:first], *[REUSED] * shared]


def gemma4(fields: Fields, kinds: Sequence[str]) -> Sequence[str]:
    """Gemma 4: as Gemma 3n, and the last layer attends to all tokens."""
    return last_share(fields, [*kinds[:-1], FULL])


def index_shared(fields: Fields, kinds: Sequence[str]) -> Sequence[str]:
    """GLM-5: layers that `indexer_types` lists as `shared` use the tokens that an earlier layer chose. Without a list,
    `index_topk_pattern` has one letter per layer, or every `index_topk_freq`-th layer chooses.
    """
    types = fields.items("indexer_types", of=str)
    pattern, every = fields.raw("index_topk_pattern"), fields.size("index_topk_freq", default=1)
    offset = fields.size("index_skip_topk_offset", default=2, least=0)
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(letter, str(letter)) for letter in pattern]
    if types is None:
        types = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(len(kinds))]
    return _by_indexer(fields, kinds, types)


def index_every_fourth(fields: Fields, kinds: Sequence[str]) -> Sequence[str]:
    """HY 4: without a list, layer 0 and every fourth layer from layer 1 on choose."""
    default = ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in range(len(kinds))]
    return _by_indexer(fields, kinds, fields.items("indexer_types", of=str) or default)


def _by_indexer(fields: Fields, kinds: Sequence[str], types: Sequence[str]) -> Sequence[str]:
    if len(types) < len(kinds) or set(types) - {"full", "shared"}:
        raise fields.error("indexer_types", f"full or shared for each of {len(kinds)} layers", list(types))
    return [INDEX_REUSED if own == "shared" else kind for kind, own in zip(kinds, types, strict=False)]


def latents_shared(fields: Fields, kinds: Sequence[str]) -> Sequence[str]:
    """Mistral Large 4: as GLM-5, and layers read the latents of the layer in `kv_source_layers`."""
    sources = fields.items("kv_source_layers", of=int) or list(range(len(kinds)))
    if len(sources) != len(kinds):
        raise fields.error("kv_source_layers", f"one layer for each of {len(kinds)}", sources)
    reused = {INDEXED: KV_REUSED, INDEX_REUSED: REUSED}
    own = index_shared(fields, kinds)
    return [kind if source == layer else reused[kind] for layer, (kind, source) in enumerate(zip(own, sources, strict=True))]
