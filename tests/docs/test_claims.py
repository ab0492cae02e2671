"""Every claim of the pages on security and operations names a test, and every named test exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"evidence/security": 35, "evidence/operations": 20}
"""The pages, and how many claims each has at least."""
NAMED = re.compile(r"`((?:tests|disagg)/[\w/]+\.py)::(\w+)`")


def claims(page: str) -> list[str]:
    """The rows of the tables of claims."""
    found, inside = list[str](), False
    for line in page.splitlines():
        inside = line == "| claim | test |" or (inside and line.startswith("|"))
        if inside and not line.startswith(("| claim |", "|---")):
            found.append(line)
    return found


@functools.cache
def named_in(path: str) -> frozenset[str]:
    """The tests of a file."""
    tree = ast.parse((ROOT / path).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return frozenset(name for name in names if name.startswith("test_"))


@pytest.mark.parametrize("name", PAGES)
def test_every_claim_names_a_test_that_exists(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    rows = claims(page)
    assert len(rows) >= PAGES[name]
    for row in rows:
        assert NAMED.search(row), row
    for path, test in NAMED.findall(page):
        assert test in named_in(path), f"{path}::{test}"


@pytest.mark.parametrize("name", PAGES)
def test_every_row_of_a_table_of_claims_is_found(name: str) -> None:
    """No table is missed because its head is written in another way."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    rows = claims(page)
    assert [line for line in page.splitlines() if line.startswith("|") and NAMED.search(line)] == rows
