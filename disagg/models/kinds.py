"""Kinds of layers: their names, and the rules that give each layer of a model its kind.

A rule takes the fields of a config and the number of layers, and returns one kind per layer. Names and rules are those of
transformers 5.23 (`configuration_*.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from disagg.models.fields import MAX_LAYERS, Fields

FULL, SLIDING, LINEAR, HYBRID = "full_attention", "sliding_attention", "linear_attention", "hybrid"
INDEXED, M3_SPARSE = "indexed_attention", "minimax_m3_sparse"
COMPRESSED, HEAVILY_COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
MLP, MOE = "mlp", "moe"
"""Names of the kinds, as transformers has them."""

_OLD_NAMES = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}
"""Names in files from before transformers settled on the names above."""
_NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}

LayerRule = Callable[[Fields, int], Sequence[str]]
"""The kind of each layer, from a config's fields and the number of layers."""
ListReader = Callable[[Fields], list[str] | None]
"""The kinds that a file lists; `None` if it lists none."""


def current_names(kinds: Iterable[str]) -> list[str]:
    """The kinds with old names replaced by today's."""
    return [_OLD_NAMES.get(kind, kind) for kind in kinds]


def listed(fields: Fields) -> list[str] | None:
    """The kinds in `layer_types`."""
    kinds = fields.items("layer_types", "layers_block_type", of=str)
    return None if kinds is None else current_names(kinds)


def listed_or_letters(fields: Fields) -> list[str] | None:
    """Nemotron-H: the kinds in `layer_types`, or one letter per layer in `hybrid_override_pattern`."""
    return listed(fields) or letters(fields, "hybrid_override_pattern")


def letters(fields: Fields, key: str) -> list[str] | None:
    """Nemotron-H: the kinds in a string of one letter per layer."""
    pattern = fields.raw(key)
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_NEMOTRON_LETTERS):
        raise fields.error(key, f"letters of {''.join(_NEMOTRON_LETTERS)}", pattern)
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def must_be_listed(fields: Fields, _: int) -> Sequence[str]:
    """No rule: raises `ConfigError`."""
    raise fields.error("layer_types", "a list of kinds of layers", None)


def every_layer(kind: str) -> LayerRule:
    """One kind for all layers."""
    return lambda _, num_layers: [kind] * num_layers


def alternating(first: str, second: str) -> LayerRule:
    """`first` for even layers, `second` for odd ones."""
    return lambda _, num_layers: [second if layer % 2 else first for layer in range(num_layers)]


def full_every_nth(other: str, *, default: int, key: str | None = None) -> LayerRule:
    """Full attention in every `default`-th layer, or as often as the field `key` says. The others are of kind `other`."""

    def rule(fields: Fields, num_layers: int) -> Sequence[str]:
        every = default if key is None else fields.size(key, default=default)
        return [other if (layer + 1) % every else FULL for layer in range(num_layers)]

    return rule


def exaone(fields: Fields, num_layers: int) -> Sequence[str]:
    """Exaone 4: full attention in every `sliding_window_pattern`-th layer; in all layers if `sliding_window` is null."""
    if fields.has("sliding_window") and fields.raw("sliding_window") is None:
        fields.windows_are_settled()
        return [FULL] * num_layers
    return full_every_nth(SLIDING, key="sliding_window_pattern", default=4)(fields, num_layers)


def window_if_set(fields: Fields, num_layers: int) -> Sequence[str]:
    """Mixtral, Phi-3: all layers have the window if `sliding_window` is set."""
    return [FULL if fields.raw("sliding_window") is None else SLIDING] * num_layers


def mistral(fields: Fields, num_layers: int) -> Sequence[str]:
    """Mistral: all layers have the window, or none has.

    The field must be present: transformers takes a file without it for a window of 4096, other readers for no window.
    """
    if not fields.has("sliding_window"):
        raise fields.error("sliding_window", "a number of tokens, or null", None)
    return window_if_set(fields, num_layers)


def upper_windows(fields: Fields, num_layers: int) -> Sequence[str]:
    """Qwen2, Qwen3: with `use_sliding_window`, the layers from `max_window_layers` on have the window."""
    if not _windows_used(fields):
        return [FULL] * num_layers
    first = fields.size("max_window_layers", least=0, most=MAX_LAYERS)
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def lower_windows(fields: Fields, num_layers: int) -> Sequence[str]:
    """Qwen2-MoE: with `use_sliding_window`, every other layer below `max_window_layers` has the window."""
    if not _windows_used(fields):
        return [FULL] * num_layers
    end = fields.size("max_window_layers", least=0, most=MAX_LAYERS)
    return [FULL if layer % 2 or layer >= end else SLIDING for layer in range(num_layers)]


def listed_if_windows(fields: Fields, num_layers: int) -> Sequence[str]:
    """SmolLM3: with `use_sliding_window`, the file must list the kinds."""
    return must_be_listed(fields, num_layers) if _windows_used(fields) else [FULL] * num_layers


def all_windows_or_none(fields: Fields, num_layers: int) -> Sequence[str]:
    """Qwen3-MoE: with `use_sliding_window`, every layer has the window."""
    return [SLIDING if _windows_used(fields) else FULL] * num_layers


def _windows_used(fields: Fields) -> bool:
    return fields.raw("sliding_window") is not None and fields.flag("use_sliding_window")


def kimi(fields: Fields, num_layers: int) -> Sequence[str]:
    """Kimi-Linear: two lists of layers, which count from 1 and together name each layer once."""
    linear = fields.section("linear_attn_config")
    full, kda = linear.items("full_attn_layers", of=int), linear.items("kda_layers", of=int)
    if full is None or kda is None or sorted(full + kda) != list(range(1, num_layers + 1)):
        raise linear.error("kda_layers", f"each of 1 to {num_layers} once in it or in full_attn_layers", (full, kda))
    return [FULL if layer in set(full) else LINEAR for layer in range(1, num_layers + 1)]


def bamba(fields: Fields, num_layers: int) -> Sequence[str]:
    """Bamba: the layers with attention, by index."""
    chosen = fields.items("attn_layer_indices", of=int) or []
    if any(not 0 <= layer < num_layers for layer in chosen):
        raise fields.error("attn_layer_indices", f"layers 0 to {num_layers - 1}", chosen)
    return [FULL if layer in chosen else LINEAR for layer in range(num_layers)]


def jamba(fields: Fields, num_layers: int) -> Sequence[str]:
    """Jamba: attention in one layer of each period."""
    period = fields.size("attn_layer_period", most=MAX_LAYERS)
    offset = fields.size("attn_layer_offset", least=0, most=period - 1)
    return [FULL if layer % period == offset else LINEAR for layer in range(num_layers)]


def minimax_m3(fields: Fields, num_layers: int) -> Sequence[str]:
    """MiniMax-M3: one flag per layer; full attention without flags."""
    sparse = fields.section("sparse_attention_config")
    chosen = sparse.items("sparse_attention_freq", of=int) or [0] * num_layers
    if any(chosen) and not sparse.flag("use_sparse_attention", default=True):
        raise sparse.error("sparse_attention_freq", "no sparse layers with use_sparse_attention=false", chosen)
    return [M3_SPARSE if is_sparse else FULL for is_sparse in chosen]


def deepseek_v4(fields: Fields, num_layers: int) -> Sequence[str]:
    """DeepSeek-V4: by each layer's compression ratio, else in transformers' default order.

    Files list the ratios of draft layers too.
    """
    ratios = fields.items("compress_ratios", of=int)
    if ratios is None:
        inner = [COMPRESSED if layer % 2 else HEAVILY_COMPRESSED for layer in range(max(num_layers - 2, 0))]
        return [HEAVILY_COMPRESSED] * min(num_layers, 2) + inner
    by_ratio = {0: SLIDING, 4: COMPRESSED, 128: HEAVILY_COMPRESSED}
    if any(ratio not in by_ratio for ratio in ratios) or len(ratios) < num_layers:
        raise fields.error("compress_ratios", f"0, 4 or 128 for each of {num_layers} layers", ratios)
    return [by_ratio[ratio] for ratio in ratios[:num_layers]]
