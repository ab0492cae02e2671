"""One side of a benchmark as text: `tp=4,pp=2,page=16,layout=nhd`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from disagg.core.errors import ConfigError
from disagg.core.formats import FLOATS, QUANTIZED
from disagg.core.topology import Topology
from disagg.layout.ownership import Owned
from disagg.layout.placement import ORDERS
from disagg.models import ModelSpec, load_model
from disagg.models.pools import PoolShape
from disagg.state.declare import State
from disagg.testing.reference import Context
from disagg.testing.token_rules import token_rule

CONTEXTS = {"tokens": Context.TOKENS_IN_TURN, "pages": Context.PAGES_IN_TURN, "blocks": Context.PAGE_BLOCKS}
"""How context-parallel ranks divide tokens: round robin by token or by page, or in blocks of pages."""

NUMBERS = ("k", "v", "latent")
"""Roles whose dtype a side may choose."""


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise ValueError("a positive integer")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(_number(part) for part in text.split("+"))
    except ValueError:
        raise ValueError("layer counts per stage such as 7+8") from None


def _one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError("one of " + ", ".join(names))
        return text

    return read


@dataclass(frozen=True, kw_only=True)
class Side:
    """One instance. `page`: tokens per page. `layout`: axis order of pages. `layers`: of every stage. `kv`: the dtype of K
    and V or latents, with scale 1; numbers are converted if the sides' differ.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    page: int = 16
    layout: str = "nhd"
    context: str = "tokens"
    layers: tuple[int, ...] | None = None
    kv: str | None = None

    def __post_init__(self) -> None:
        self.topology(0)
        if self.layers is not None and len(self.layers) != self.pp:
            raise ConfigError(f"layers: expected a count for each of {self.pp} stages, found {'+'.join(map(str, self.layers))}")

    @classmethod
    def parse(cls, text: str) -> Side:
        """Raises `ConfigError` that quotes `text`.

        >>> Side.parse("tp=4,page=64")
        Side(tp=4, pp=1, dp=1, cp=1, ep=1, page=64, layout='nhd', context='tokens', layers=None, kv=None)
        """
        found: dict[str, int | str | tuple[int, ...]] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = part.partition("=")
            if not equals or key not in _READERS:
                raise ConfigError(f"side {text!r}: expected KEY=VALUE with a key of {', '.join(_READERS)}, found {part!r}")
            if key in found:
                raise ConfigError(f"side {text!r}: {key} is given twice")
            try:
                found[key] = _READERS[key](value)
            except ValueError as error:
                raise ConfigError(f"side {text!r}, {key}: expected {error}, found {value!r}") from None
        try:
            return cls(**found)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"side {text!r}: {error}") from None

    def __str__(self) -> str:
        """A text that `parse` reads as this side: `tp`, `page`, and what is not the default."""
        shown = [f for f in fields(self) if f.name in ("tp", "page") or getattr(self, f.name) != f.default]
        values = {f.name: getattr(self, f.name) for f in shown}
        return ",".join(f"{k}={'+'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in values.items())

    def topology(self, rank: int = 0) -> Topology:
        return Topology(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp, ep=self.ep).at(rank)

    def model(self, name: str, *, num_layers: int | None = None) -> ModelSpec:
        spec = load_model(name, num_layers=num_layers, kv_dtype=self.kv)
        return spec if self.kv is None else replace(spec, states=tuple(_with_scales(state) for state in spec.states))

    @property
    def num_ranks(self) -> int:
        return self.topology().num_ranks

    @property
    def context_kind(self) -> Context:
        return CONTEXTS[self.context] if self.cp > 1 else Context.WHOLE

    def tokens(self, rank: Topology) -> Owned:
        return token_rule(self.context_kind, self.page)(rank)

    def pool_shape(self, num_pages: int, *, num_slots: int = 8, rows: Mapping[str, int] | None = None) -> PoolShape:
        """`rows` overrides both numbers by component."""
        return PoolShape(
            page_size=self.page,
            num_pages=num_pages,
            num_slots=num_slots,
            rows=rows or {},
            order=self.layout,
            layer_counts=self.layers,
            tokens=self.tokens,
        )


def _with_scales(state: State) -> State:
    roles = (replace(role, scale=1.0) if role.name in NUMBERS else role for role in state.roles)
    return replace(state, roles=tuple(roles)) if state.rows == "pages" else state


_READERS: dict[str, Callable[[str], int | str | tuple[int, ...]]] = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "page"), _number),
    "layout": _one_of(*ORDERS),
    "context": _one_of(*CONTEXTS),
    "layers": _numbers,
    "kv": _one_of(*FLOATS, *QUANTIZED),
}
