"""A plug-in of SGLang that gives its engine for CPUs what the wheel lacks. `scripts/sglang_env.sh` installs it.

Kernels of gated delta networks for CPUs are in no wheel: here they are written with PyTorch, a token at a time. Shapes are
those of SGLang's calls.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn.functional import normalize, rms_norm, silu, softplus

Tensor = torch.Tensor


def register() -> None:
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    # Data-parallel attention: the length of sequences that pad a batch, and ranks without a token in a step.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    rotate = RotaryEmbedding.forward_native

    def forward_native(rotary: Any, positions: Tensor, query: Tensor, key: Tensor, *more: Any, **named: Any) -> Any:
        return rotate(rotary, positions, query, key, *more, **named) if positions.numel() else (query, key)

    RotaryEmbedding.forward_native = forward_native
    fused_norm_gate.rms_norm_gated, elementwise.fused_gate_sigmoid_mul_add = gated_norm, add_gated
    mamba: Any = importlib.import_module("sgl_kernel.mamba")
    mamba.causal_conv1d_fn_cpu, mamba.causal_conv1d_update_cpu = convolve, convolve_next
    mamba.chunk_gated_delta_rule_cpu = delta_rule
    operators: Any = torch.ops.sgl_kernel
    operators.fused_gdn_gating_cpu, operators.fused_sigmoid_gating_delta_rule_update_cpu = gate, delta_rule_next


def add_gated(x: Tensor, weight: Tensor, shared: Tensor, out: Tensor) -> None:
    """Add what shared experts give for `x`, of shape (tokens, size), times their gate."""
    out += (x @ weight).sigmoid()[:, None] * shared


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, *_: Any, eps: float, **__: Any) -> Tensor:
    """The norm of each row of `x`, of shape (rows, size), times `silu` of its gate."""
    return (rms_norm(x.float(), weight.shape, weight.float(), eps) * silu(gate.float())).to(x.dtype)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, conv_states: Tensor, query_start_loc: Tensor, cache_indices: Tensor,
    has_initial_state: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    """Convolve each channel of `x`, of shape (channels, tokens of all sequences), and keep the last tokens in its state."""
    found, width = torch.empty_like(x), weight.shape[1]
    for number, slot in enumerate(cache_indices.tolist()):
        start, stop = query_start_loc[number : number + 2].tolist()
        before = conv_states[slot] if has_initial_state[number] else torch.zeros_like(conv_states[slot])
        tokens = torch.cat([before.to(x.dtype), x[:, start:stop]], dim=1)
        out = (tokens.unfold(1, width, 1) * weight[:, None, :]).sum(-1)
        found[:, start:stop] = silu(out if bias is None else out + bias[:, None])
        conv_states[slot] = tokens[:, 1 - width :].to(conv_states.dtype)
    return found


def convolve_next(x: Tensor, states: Tensor, weight: Tensor, bias: Any, _: Any, *, conv_state_indices: Tensor) -> Tensor:
    """`convolve` of one token of each sequence: `x` has the shape (sequences, channels)."""
    starts = torch.arange(len(x) + 1)
    has_state = torch.ones(len(x), dtype=torch.bool)
    found = convolve(x.T, weight, bias, conv_states=states, query_start_loc=starts, cache_indices=conv_state_indices,
                     has_initial_state=has_state)  # fmt: skip
    return found.T


def gate(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay, and the rate of the update, of shape (1, tokens, heads)."""
    decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, initial_state_indices: Tensor,
    cu_seqlens: Tensor, **_: Any,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Read and update the states, of shape (slots, value heads, value size, key size), with tokens of shape (1, tokens, heads,
    size).
    """
    shared = v.shape[2] // q.shape[2]
    q, k = (normalize(each[0].float(), dim=-1).repeat_interleave(shared, dim=1) for each in (q, k))
    q, value, found = q * q.shape[-1] ** -0.5, v[0].float(), torch.empty_like(v)
    for number, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for token in range(*cu_seqlens[number : number + 2].tolist()):
            state = state * g[0, token, :, None, None].exp()
            error = value[token] - torch.einsum("hvk,hk->hv", state, k[token])
            state = state + torch.einsum("hv,hk->hvk", error * beta[0, token, :, None], k[token])
            found[0, token] = torch.einsum("hvk,hk->hv", state, q[token]).to(found.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return found, None, None


def delta_rule_next(
    *, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, initial_state_source: Tensor,
    initial_state_indices: Tensor, cu_seqlens: Tensor, **more: Any,
) -> Tensor:  # fmt: skip
    """`delta_rule` of one token of each sequence."""
    given = {"initial_state": initial_state_source, "initial_state_indices": initial_state_indices, "cu_seqlens": cu_seqlens}
    return delta_rule(q, k, v, *gate(more["A_log"], a, b, dt_bias), **given)[0]
