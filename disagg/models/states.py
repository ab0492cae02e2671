"""The state that a layer of each kind leaves, from a config's fields. Field names are those of transformers 5.23
(`configuration_*.py`). A field that its class gives no rule for must be in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from disagg.models.fields import Dtypes, Fields
from disagg.models.kinds import COMPRESSED, FULL, HEAVILY_COMPRESSED, SLIDING
from disagg.state.declare import Role, State, whole
from disagg.state.mamba import convolution_roles, gdn_roles, kda_roles, lightning_roles, mamba1_roles, mamba2_roles
from disagg.state.paged import gqa_roles, mla_roles
from disagg.state.sparse import compressed_roles, index_roles

StateMaker = Callable[[Fields, tuple[int, ...], Dtypes], State]

# -- attention ---------------------------------------------------------------------------------------------------------


SizeRule = Callable[[Fields], int]


def kv_heads(fields: Fields) -> int:
    return _divisor(fields, fields.size("num_key_value_heads"))


def kv_heads_or_all(fields: Fields) -> int:
    return _divisor(fields, fields.size("num_key_value_heads", default=fields.size("num_attention_heads")))


def multi_query(fields: Fields) -> int:
    return 1 if fields.flag("multi_query", default=True) else fields.size("num_attention_heads")


def falcon_heads(fields: Fields) -> int:
    heads = fields.size("num_kv_heads", default=fields.size("num_attention_heads"))
    return _divisor(fields, heads) if fields.flag("new_decoder_architecture") else multi_query(fields)


def dbrx_heads(fields: Fields) -> int:
    return _divisor(fields, fields.section("attn_config").size("kv_n_heads", default=1))


def mpt_heads(fields: Fields) -> int:
    """MPT: by default one per query head. Transformers reads neither field, vLLM does."""
    attention, heads = fields.section("attn_config"), fields.size("num_attention_heads")
    default = 1 if attention.raw("attn_type") == "multiquery_attention" else heads
    return _divisor(fields, attention.size("kv_n_heads", default=default))


def mimo_window_heads(fields: Fields) -> int:
    """MiMo-V2: in layers with a window, by default twice those of the others."""
    fields.raw("swa_num_attention_heads")  # of queries
    return _divisor(fields, fields.size("swa_num_key_value_heads", default=2 * fields.size("num_key_value_heads")))


def _divisor(fields: Fields, count: int) -> int:
    heads = fields.size("num_attention_heads")
    if heads % count:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}", count)
    return count


def head_dim(fields: Fields) -> int:
    return fields.size("head_dim", "attention_head_dim")


def head_dim_or_hidden(fields: Fields) -> int:
    return hidden_per_head(fields) if fields.raw("head_dim", "attention_head_dim") is None else head_dim(fields)


def zamba_head_dim(fields: Fields) -> int:
    """Zamba: attention reads the layer's input beside the embedding, so heads are twice as wide."""
    fields.raw("kv_channels", "num_query_groups")  # in published files; the model does not use them
    return hidden_per_head(fields, 2) if fields.raw("attention_head_dim") is None else fields.size("attention_head_dim")


def hidden_per_head(fields: Fields, times: int = 1) -> int:
    """`times * hidden_size / num_attention_heads`, whatever `head_dim` the file has."""
    fields.raw("head_dim")
    hidden, heads = times * fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads={heads}", hidden)
    return hidden // heads


def _window(fields: Fields) -> int:
    """Including the token that attends."""
    return fields.size("sliding_window")


def mimo_window(fields: Fields) -> int:
    """MiMo-V2: a `sliding_window_size` counts only the tokens before the one that attends."""
    fields.raw("sliding_window")
    return _window(fields) if fields.raw("sliding_window_size") is None else fields.size("sliding_window_size") + 1


def chunk(fields: Fields) -> int:
    """Llama 4: the next token reads the part of its chunk before it."""
    return fields.size("attention_chunk_size")


def attention(
    *, heads: SizeRule = kv_heads, dim: SizeRule = head_dim, v_dim: SizeRule | None = None, window: SizeRule | None = None
) -> StateMaker:
    """K and V by head. With `window` decode needs the last `window - 1` tokens: the next one attends to itself too."""

    def make(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
        num_heads, k_dim = heads(fields), dim(fields)
        if v_dim is None and fields.raw("v_head_dim") not in (None, k_dim):
            raise fields.error("v_head_dim", f"the size of K's heads, {k_dim}", fields.raw("v_head_dim"))
        dims = (k_dim, k_dim if v_dim is None else v_dim(fields))
        roles: tuple[Role, ...] = gqa_roles(num_heads, dims=dims, dtype=dtypes.kv)
        if dtypes.scale_block is not None:
            scales = gqa_roles(num_heads, dims=(dtypes.num_scales(dims[0]), dtypes.num_scales(dims[1])), dtype="float32")
            roles += tuple(replace(role, name=f"{role.name}_scale") for role in scales)
        if window is None:
            return State(name="kv", rows="pages", layers=layers, roles=roles)
        return State(name="window", rows="pages", layers=layers, roles=roles, window=window(fields) - 1)

    return make


def kv_or_window(
    heads: SizeRule = kv_heads, dim: SizeRule = head_dim, window: SizeRule = _window
) -> Mapping[str, tuple[StateMaker, ...]]:
    return {FULL: (attention(heads=heads, dim=dim),), SLIDING: (attention(heads=heads, dim=dim, window=window),)}


def _latent_roles(dim: int, rope: int, dtypes: Dtypes) -> tuple[Role, ...]:
    """`dim` elements and a rotated part of `rope` per token: one tensor, or two if blocks have scales."""
    if dtypes.scale_block is None:
        return mla_roles(dim + rope, dtype=dtypes.kv)
    rotated = replace(mla_roles(rope, dtype=dtypes.weights)[0], name="rope")
    return (*mla_roles(dim, dtype=dtypes.kv, scales=dtypes.num_scales(dim), scales_dtype="float32"), rotated)


def mla(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    """Heads are computed from the latents, so `v_head_dim` adds no state."""
    fields.raw("v_head_dim")
    if not fields.flag("use_mla", default=True):
        raise fields.error("use_mla", "true", False)
    roles = _latent_roles(fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim"), dtypes)
    return State(name="mla", rows="pages", layers=layers, roles=roles)


def index(fields: Fields, layers: tuple[int, ...], _: Dtypes, *, ratio: int = 1) -> State:
    """FP8 index keys with a float32 scale per 128 elements; a page holds its keys and then its scales, as in servers."""
    fields.size("index_topk")
    dim = fields.size("index_head_dim")
    roles = index_roles(key_nbytes=dim, scale_nbytes=4 * -(-dim // 128), tokens_per_key=ratio)
    return State(name="index", rows="pages", layers=layers, roles=roles, packed=True)


def m3_index(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    """MiniMax-M3: one index key per token in the weights' dtype, and no index values."""
    sparse = fields.section("sparse_attention_config")
    dim = sparse.size("sparse_index_dim", default=fields.raw("index_head_dim"))
    without_values = sparse.items("sparse_disable_index_value", of=int)
    for layer in layers if without_values is not None else ():
        if layer >= len(without_values or ()) or not (without_values or ())[layer]:
            raise sparse.error("sparse_disable_index_value", f"1 for layer {layer}: no index values", without_values)
    key = Role(name="key", axes="page token dim", inner={"dim": whole(dim)}, dtype=dtypes.weights)
    return State(name="index", rows="pages", layers=layers, roles=(key,))


# -- recurrent state ---------------------------------------------------------------------------------------------------


def _recurrent(layers: tuple[int, ...], roles: tuple[Role, ...]) -> State:
    return State(name="ssm", rows="slot", layers=layers, roles=roles)


def gdn(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    key_heads, value_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads={key_heads}", value_heads)
    roles = gdn_roles(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=fields.size("linear_key_head_dim"),
        value_head_dim=fields.size("linear_value_head_dim"),
        kernel=fields.size("linear_conv_kernel_dim", least=2),
        dtypes=(dtypes.weights, dtypes.ssm or "float32"),
    )
    return _recurrent(layers, roles)


def kda(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    linear = fields.section("linear_attn_config")
    linear.raw("kda_layers", "full_attn_layers")  # the kinds of layers are known here
    fields.raw("kda_lower_bound")  # a limit of the decay
    as_attention = fields.model_type == "bailing_hybrid"  # what the section leaves out is that of attention's heads
    dim = linear.size("head_dim", default=fields.raw("linear_head_dim", *(("head_dim",) if as_attention else ())))
    num_heads = fields.raw("linear_num_heads", *(("num_attention_heads",) if as_attention else ()))
    roles = kda_roles(
        num_heads=linear.size("num_heads", default=num_heads),
        key_head_dim=dim,
        value_head_dim=dim,
        kernel=linear.size(
            "short_conv_kernel_size", default=fields.raw("linear_conv_kernel_dim", "short_conv_kernel_size"), least=2
        ),
        dtypes=(dtypes.weights, dtypes.ssm or "float32"),
    )
    return _recurrent(layers, roles)


def mamba2(head_dim: Callable[[Fields, int], int]) -> StateMaker:
    def make(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
        heads, groups = fields.size("mamba_n_heads"), fields.size("mamba_n_groups")
        if heads % groups:
            raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads={heads}", groups)
        roles = mamba2_roles(
            num_heads=heads,
            head_dim=head_dim(fields, heads),
            num_groups=groups,
            state_size=fields.size("mamba_d_state"),
            kernel=fields.size("mamba_d_conv", least=2),
            dtypes=(dtypes.weights, dtypes.ssm or "float32"),
        )
        return _recurrent(layers, roles)

    return make


def mamba_head_dim(fields: Fields, heads: int) -> int:
    inner = _inner_size(fields)
    in_file = fields.raw("mamba_d_head")
    dim = inner // heads if in_file in (None, "auto") else fields.size("mamba_d_head")
    if heads * dim != inner:
        raise fields.error("mamba_d_head", f"inner size {inner} over mamba_n_heads={heads}", in_file)
    return dim


def _inner_size(fields: Fields) -> int:
    is_null = fields.has("mamba_d_ssm") and fields.raw("mamba_d_ssm") is None
    if (fields.model_type == "falcon_h1" and not is_null) or fields.raw("mamba_d_ssm") is not None:
        return fields.size("mamba_d_ssm")  # without it Falcon-H1 has a size of its own
    return fields.size("mamba_expand") * fields.size("hidden_size")


def mamba1(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    roles = mamba1_roles(
        inner_size=_inner_size(fields),
        state_size=fields.size("mamba_d_state"),
        kernel=fields.size("mamba_d_conv", least=2),
        dtypes=(dtypes.weights, dtypes.ssm or "float32"),
    )
    return _recurrent(layers, roles)


def lightning(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    heads, dim = fields.size("num_attention_heads"), head_dim_or_hidden(fields)
    roles = lightning_roles(num_heads=heads, key_head_dim=dim, value_head_dim=dim, dtype=dtypes.ssm or dtypes.weights)
    return _recurrent(layers, roles)


def short_convolution(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    """LFM2: over the hidden size, without a temporal state."""
    roles = convolution_roles(
        channels=fields.size("hidden_size"), kernel=fields.size("conv_L_cache", least=2), dtype=dtypes.weights
    )
    return State(name="conv", rows="slot", layers=layers, roles=roles)


# -- DeepSeek-V4 -------------------------------------------------------------------------------------------------------

# Every layer has a window of one latent per token (K is V) and, by kind, a compressed past. Tokens not yet compressed lie in
# an open ring per request. Groups: transformers' modeling_deepseek_v4. Rings hold the projection and its score in float32,
# twice as wide and twice as long where windows overlap: SGLang's compress state pool.


def _v4_roles(fields: Fields, dtypes: Dtypes, *, ratio: int = 1) -> tuple[Role, ...]:
    dim = fields.size("head_dim", least=2)
    rope = None if fields.raw("qk_rope_head_dim") is None else fields.size("qk_rope_head_dim", most=dim - 1)
    if dtypes.scale_block is None:
        return compressed_roles(dim, ratio=ratio, dtype=dtypes.kv)
    if rope is None:
        raise fields.error("qk_rope_head_dim", "the elements that keep the weights' dtype beside KV with block scales", None)
    return tuple(replace(role, granule=ratio) for role in _latent_roles(dim - rope, rope, dtypes))


def _v4_ratio(fields: Fields, kind: str) -> int:
    """Tokens per compressed entry."""
    rates = fields.section("compress_rates")
    old_key, default = {COMPRESSED: ("compress_rate_csa", 4), HEAVILY_COMPRESSED: ("compress_rate_hca", 128)}[kind]
    if fields.raw(old_key) is None:
        return rates.size(kind, default=default, least=2)
    return fields.size(old_key, least=2)


def v4_window(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    window = fields.size("sliding_window") - 1
    return State(name="window", rows="pages", layers=layers, roles=_v4_roles(fields, dtypes), window=window)


def v4_compressed(name: str, kind: str) -> StateMaker:
    def make(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
        roles = _v4_roles(fields, dtypes, ratio=_v4_ratio(fields, kind))
        return State(name=name, rows="pages", layers=layers, roles=roles)

    return make


def v4_index(fields: Fields, layers: tuple[int, ...], dtypes: Dtypes) -> State:
    return index(fields, layers, dtypes, ratio=_v4_ratio(fields, COMPRESSED))


def v4_open(name: str, kind: str, dim_key: str) -> StateMaker:
    """The last group of tokens, and the one before it where windows overlap."""

    def make(fields: Fields, layers: tuple[int, ...], _: Dtypes) -> State:
        overlap = 2 if kind == COMPRESSED else 1
        ring = overlap * _v4_ratio(fields, kind)
        inner = {"dim": whole(2 * overlap * fields.size(dim_key))}
        role = Role(name="kv_score", axes="page token dim", inner=inner, dtype="float32")
        return State(name=name, rows="pages", layers=layers, roles=(role,), window=ring - 1, ring=ring)

    return make
