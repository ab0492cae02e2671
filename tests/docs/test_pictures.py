"""The pictures of `docs/explain.md` are those that the command above each draws today."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from scripts.docs_pictures import draw_explained, explained

IMAGES = Path(__file__).parents[2] / "docs/images"


def texts(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", picture.read_text())


def numbers(picture: Path) -> np.ndarray:
    """The coordinates of every line and area."""
    return np.array(re.findall(r"-?\d+(?:\.\d+)?", " ".join(re.findall(r'<path d="([^"]+)"', picture.read_text()))), float)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    draw_explained(folder)
    return folder


@pytest.mark.parametrize("name", explained())
def test_the_tool_draws_the_pictures_of_the_page(drawn: Path, name: str) -> None:
    assert texts(drawn / name) == texts(IMAGES / name), "run python scripts/generate_docs.py --pictures"
    assert numbers(drawn / name) == pytest.approx(numbers(IMAGES / name), abs=0.5)


def test_every_picture_has_a_command_of_its_own() -> None:
    assert set(explained()) == {path.name for path in IMAGES.glob("explain-*")}
    assert len({tuple(options) for options in explained().values()}) == len(explained()) == 4


def test_a_picture_of_another_command_differs(drawn: Path) -> None:
    assert texts(drawn / "explain-llama-nhd.svg") != texts(IMAGES / "explain-llama-hnd.svg")
    assert len(numbers(drawn / "explain-llama-nhd.svg")) > 1000
