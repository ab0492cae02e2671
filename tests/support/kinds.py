"""Kinds of state: each by the reference, with the component that the library makes of the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.core.memory import RawTensor
from disagg.core.topology import Topology
from disagg.layout.placement import ORDERS, Component
from disagg.state import adapter, declare, mamba, paged, sparse, window
from disagg.testing import state_models
from disagg.testing.reference_states import Form
from disagg.testing.state_models import GlobalAxis, StateModel


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What a server declares a component from: tensors, topology, the layers of each stage."""

    tensors: dict[str, dict[int, RawTensor]]
    topology: Topology
    stages: tuple[tuple[int, ...], ...]
    form: Form
    tokens: declare.Rule
    pages: dict[int, Any]

    @property
    def common(self) -> dict[str, Any]:
        return {"topology": self.topology, "layers_by_stage": self.stages}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A state by the reference, and the library's component for it. `window`: number of last tokens that are needed."""

    model: StateModel
    layers: tuple[int, ...]
    build: Callable[[Pools], Component]
    form: Form
    window: int | None = None

    @property
    def name(self) -> str:
        return self.model.name


def _dtypes(model: StateModel) -> tuple[str, str]:
    return model.tensors[0].dtype, model.tensors[-1].dtype


def gqa_kind(
    *,
    num_kv_heads: int = 4,
    dims: tuple[int, int] = (3, 2),
    layers: Sequence[int] = (0, 1),
    name: str = "kv",
    scales: int = 0,
    **more: Any,
) -> Kind:
    """Full attention, with `scales` block scales per head and token; sliding-window attention if `window` is given."""
    model = state_models.gqa(num_kv_heads=num_kv_heads, dims=dims, name=name, scales=scales)
    make: Callable[..., Component] = window.swa if "window" in more else paged.gqa

    def pairs(pools: Pools, suffix: str = "") -> dict[int, Any]:
        keys, values = pools.tensors[f"k{suffix}"], pools.tensors[f"v{suffix}"]
        return {layer: (keys[layer], values[layer]) for layer in keys}

    def build(pools: Pools) -> Component:
        axes = pools.form.orders.get("k", ORDERS["nhd"])
        sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "dims": dims, "dtype": "uint16"}
        if scales:
            sizes |= {"scales": pairs(pools, "_scale"), "scales_per_head": scales, "scales_dtype": "float32"}
        return make(pairs(pools), axes=axes, name=name, tokens=pools.tokens, **sizes, **pools.common)

    form = more.pop("form", Form(num_rows=12, page_size=4))
    return Kind(model=model, layers=tuple(layers), build=build, form=form, **more)


def mla_kind(*, dim: int = 5, scales: int = 0, layers: Sequence[int] = (0, 1), name: str = "mla", **more: Any) -> Kind:
    model = state_models.mla(dim=dim, scales=scales, name=name)
    optional = more.pop("optional", False)

    def build(pools: Pools) -> Component:
        given: dict[str, Any] = {"dtype": "uint16", "optional": optional, "tokens": pools.tokens}
        if scales:
            given |= {"scales": pools.tensors["latent_scale"], "scales_dim": scales, "scales_dtype": "float32"}
        axes = pools.form.orders.get("latent", "page token dim")
        return paged.mla(pools.tensors["latent"], dim=dim, axes=axes, name=name, **given, **pools.common)

    form = more.pop("form", Form(num_rows=12, page_size=4))
    return Kind(model=model, layers=tuple(layers), build=build, form=form, **more)


def slot_kind(model: StateModel, roles: Sequence[declare.Role], *, layers: Sequence[int] = (0, 1), **more: Any) -> Kind:
    """A recurrent state."""

    def build(pools: Pools) -> Component:
        axes = dict(pools.form.orders)
        return mamba.recurrent(roles, pools.tensors, axes=axes, name=model.name, **pools.common)

    return Kind(model=model, layers=tuple(layers), build=build, form=more.pop("form", Form(num_rows=5)), **more)


def gdn_kind(
    *, num_key_heads: int = 4, num_value_heads: int = 8, dims: tuple[int, int] = (2, 3), kernel: int = 4, **more: Any
) -> Kind:
    shape: dict[str, Any] = {
        "num_key_heads": num_key_heads,
        "num_value_heads": num_value_heads,
        "key_head_dim": dims[0],
        "value_head_dim": dims[1],
        "kernel": kernel,
    }
    model = state_models.gdn(**shape, name=more.pop("name", "ssm"))
    return slot_kind(model, mamba.gdn_roles(**shape, dtypes=_dtypes(model)), **more)


def kda_kind(
    *, num_heads: int = 4, dims: tuple[int, int] = (2, 3), kernel: int = 4, separate: bool = False, **more: Any
) -> Kind:
    shape: dict[str, Any] = {"num_heads": num_heads, "key_head_dim": dims[0], "value_head_dim": dims[1], "kernel": kernel}
    model = state_models.kda(**shape, separate=separate, name=more.pop("name", "ssm"))
    usual = {tensor.role: "slot width channel" for tensor in model.tensors if tensor.role.startswith("conv")}
    form = more.pop("form", Form(num_rows=5))
    form = Form(**{**vars(form), "orders": {**usual, **form.orders}})
    return slot_kind(model, mamba.kda_roles(**shape, fused=not separate, dtypes=_dtypes(model)), form=form, **more)


def mamba2_kind(
    *, num_heads: int = 8, head_dim: int = 2, num_groups: int = 2, state_size: int = 3, kernel: int = 4, **more: Any
) -> Kind:
    shape: dict[str, Any] = {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_groups": num_groups,
        "state_size": state_size,
        "kernel": kernel,
    }
    model = state_models.mamba2(**shape, name=more.pop("name", "ssm"))
    return slot_kind(model, mamba.mamba2_roles(**shape, dtypes=_dtypes(model)), **more)


def mamba1_kind(*, inner: int = 8, state_size: int = 3, kernel: int = 4, **more: Any) -> Kind:
    model = state_models.mamba1(inner=inner, state_size=state_size, kernel=kernel, name=more.pop("name", "ssm"))
    roles = mamba.mamba1_roles(inner_size=inner, state_size=state_size, kernel=kernel, dtypes=_dtypes(model))
    return slot_kind(model, roles, **more)


def convolution_kind(*, channels: int = 8, kernel: int = 4, **more: Any) -> Kind:
    model = state_models.convolution(channels=channels, kernel=kernel, name=more.pop("name", "conv"))
    return slot_kind(model, mamba.convolution_roles(channels=channels, kernel=kernel, dtype="uint16"), **more)


def lightning_kind(*, num_heads: int = 8, dims: tuple[int, int] = (2, 3), **more: Any) -> Kind:
    shape: dict[str, Any] = {"num_heads": num_heads, "key_head_dim": dims[0], "value_head_dim": dims[1]}
    model = state_models.lightning(**shape, name=more.pop("name", "ssm"))
    return slot_kind(model, mamba.lightning_roles(**shape, dtype="float32"), **more)


def index_kind(
    *,
    key_nbytes: int = 6,
    scale_nbytes: int = 2,
    granule: int = 1,
    layers: Sequence[int] = (0, 1),
    name: str = "index",
    **more: Any,
) -> Kind:
    """Index keys followed by their scales in one page; with rings, the open pool."""
    model = state_models.index_keys(key_nbytes=key_nbytes, scale_nbytes=scale_nbytes, granule=granule, name=name)
    form = more.pop("form", Form(num_rows=12, page_size=4, one_page=True))

    def build(pools: Pools) -> Component:
        sizes: dict[str, Any] = {"key_nbytes": key_nbytes, "scale_nbytes": scale_nbytes, "name": name, **pools.common}
        if pools.form.ring:
            return sparse.index_tail(pools.pages, tail=pools.form.page_size, **sizes)
        page_size = pools.form.page_size
        return sparse.index_keys(pools.pages, page_size=page_size, tokens_per_key=granule, tokens=pools.tokens, **sizes)

    return Kind(model=model, layers=tuple(layers), build=build, form=form, **more)


def compressed_kind(*, ratio: int, name: str, dim: int = 3, layers: Sequence[int] = (0, 1), **more: Any) -> Kind:
    model = state_models.compressed(dim=dim, ratio=ratio, name=name)

    def build(pools: Pools) -> Component:
        sizes: dict[str, Any] = {"ratio": ratio, "dim": dim, "dtype": "uint16", "name": name, "tokens": pools.tokens}
        return sparse.compressed(pools.tensors["latent"], **sizes, **pools.common)

    form = more.pop("form", Form(num_rows=12, page_size=2 * ratio))
    return Kind(model=model, layers=tuple(layers), build=build, form=form, **more)


def adapter_kind(
    role: str,
    *,
    order: str,
    sizes: Mapping[str, int],
    name: str = "adapter",
    layers: Sequence[int] = (0, 1),
    dtype: str = "uint16",
) -> Kind:
    """One module of a mixture-of-experts adapter. Axes `expert` and `intermediate` are sharded, others are whole."""
    rules: dict[str, Callable[[int], GlobalAxis]] = {"expert": state_models.experts, "intermediate": state_models.intermediate}
    axes = {axis: rules.get(axis, state_models.replicated)(size) for axis, size in sizes.items()}
    model = StateModel(name=f"{name}.{role}", tensors=(state_models.StateTensor(role=role, axes=axes, dtype=dtype),))

    def build(pools: Pools) -> Component:
        (component,) = adapter.moe_lora(
            pools.tensors,
            axes={role: pools.form.orders.get(role, order)},
            sizes={role: dict(sizes)},
            num_experts=sizes["expert"],
            name=name,
            dtype=dtype,
            **pools.common,
        )
        return component

    return Kind(model=model, layers=tuple(layers), build=build, form=Form(num_rows=3, orders={role: order}))
