"""Prints files, classes and functions that are long, for reviewers.

Nothing fails: a place that is cut only to be shorter is worse than a long one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_FILE, LONG_CLASS, MANY_STATEMENTS = 400, 300, 40
PYTHON = ("disagg", "harness", "benchmarks", "examples", "scripts")
NATIVE = ("csrc", "disagg")


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
    """Every place that is long, with its size: a path in lines, or a path and a name in lines or statements."""
    found: dict[str, int] = {}
    for folder in PYTHON:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place, text = str(path.relative_to(ROOT)), path.read_text()
            sizes = {place: (text.count("\n"), LONG_FILE)}
            for name, node in definitions(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    sizes[f"{place}:{name}"] = (node.end_lineno or 0) - node.lineno + 1, LONG_CLASS
                else:
                    sizes[f"{place}:{name}"] = statements(node), MANY_STATEMENTS
            found |= {where: size for where, (size, long) in sizes.items() if size > long}
    for folder in NATIVE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cpp", ".hpp", ".cu", ".pyi"):
                size = path.read_text().count("\n")
                if size > LONG_FILE:
                    found[str(path.relative_to(ROOT))] = size
    return found


if __name__ == "__main__":
    for where, size in oversized().items():
        print(f"  {where}: {size}")
