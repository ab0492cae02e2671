"""Limits on the sizes of files, classes and functions.

A place that exceeds a limit is listed with its size in `EXCEPTIONS`, which may only shrink: a listed size that is too large
fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_STATEMENTS = 400, 300, 40
PYTHON = ("disagg", "harness", "benchmarks", "examples", "scripts")
NATIVE = ("csrc", "disagg")

EXCEPTIONS: dict[str, int] = {}
"""Sizes above a limit, by place: a path, or a path and a qualified name."""


def statements(function: ast.AST) -> int:
    """The number of statements in a function, with those of nested blocks and functions."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every class and function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            yield name, node
            yield from definitions(node, f"{name}.")
        else:
            yield from definitions(node, prefix)


def oversized() -> dict[str, int]:
    """Every place that exceeds its limit, with its size."""
    found: dict[str, int] = {}
    for folder in PYTHON:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place, text = str(path.relative_to(ROOT)), path.read_text()
            sizes = {place: (text.count("\n"), MAX_FILE_LINES)}
            for name, node in definitions(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    sizes[f"{place}:{name}"] = (node.end_lineno or 0) - node.lineno + 1, MAX_CLASS_LINES
                else:
                    sizes[f"{place}:{name}"] = statements(node), MAX_STATEMENTS
            found |= {where: size for where, (size, limit) in sizes.items() if size > limit}
    for folder in NATIVE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cpp", ".hpp", ".cu", ".pyi"):
                size = path.read_text().count("\n")
                if size > MAX_FILE_LINES:
                    found[str(path.relative_to(ROOT))] = size
    return found


def test_no_file_class_or_function_exceeds_its_limit() -> None:
    assert oversized() == EXCEPTIONS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    pass\n", 1),
        ("def f():\n    if x:\n        y = 1\n    else:\n        y = 2\n    return y\n", 4),
        ("def f():\n    def g():\n        return 1\n    return g\n", 3),
    ],
)
def test_statements_of_nested_blocks_count(source: str, expected: int) -> None:
    assert statements(ast.parse(source).body[0]) == expected
