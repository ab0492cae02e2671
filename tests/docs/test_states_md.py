"""`docs/states.md` covers every state kind."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from disagg.state import adapter, mamba, paged, sparse, window

PAGE = Path(__file__).resolve().parents[2] / "docs" / "states.md"


def components_and_roles(module: ModuleType) -> set[str]:
    """The functions of a module that declare a kind."""
    name = module.__name__.rpartition(".")[2]
    made = {"Component", "list[Component]", "tuple[Role]", "tuple[Role, Role]", "tuple[Role, ...]"}
    return {
        f"{name}.{key}"
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and not key.startswith("_")
        and getattr(value, "__annotations__", {}).get("return") in made
    }


def test_every_kind_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    kinds = set().union(*map(components_and_roles, (adapter, mamba, paged, sparse, window)))
    assert len(kinds) > 10
    assert sorted(kind for kind in kinds if f"`{kind}`" not in text) == []
