"""Every causal and multimodal model type of transformers is described, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.core.errors import ConfigError
from disagg.models import from_config
from disagg.models.decoders import MULTIMODAL, REFUSED
from disagg.models.families import FAMILIES
from tests.support.architectures import CASES, EVERY_RUN, IN_EXAMPLES, IN_VLLM, NESTED

auto = pytest.importorskip("transformers.models.auto.modeling_auto")

TYPES = {
    *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
DESCRIBED = {*FAMILIES, *MULTIMODAL}
ROOT = Path(__file__).parents[2]


def test_every_type_is_described_or_refused() -> None:
    assert sorted(TYPES - DESCRIBED - set(REFUSED)) == []
    assert sorted(DESCRIBED & set(REFUSED)) == []


def test_every_described_type_is_tested() -> None:
    assert sorted(DESCRIBED - {*CASES, *NESTED, *IN_EXAMPLES, *IN_VLLM}) == []
    assert {*EVERY_RUN, *NESTED.values()} <= set(CASES)


def test_the_pages_count_the_types_that_are_described() -> None:
    described, refused, more = len(TYPES & DESCRIBED), len(TYPES & set(REFUSED)), len(DESCRIBED - TYPES)
    readme, support = (" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/support.md"))
    assert f"{described} of the {len(TYPES)} causal and multimodal model types of transformers" in readme
    assert f"and {more} more names" in readme
    assert f"the other {refused} are refused" in readme
    assert f"Of the {len(TYPES)} causal and multimodal model types of transformers" in support
    assert f"{described} are described and {refused} are refused" in support
    assert f"{more} described ones" in support


def test_a_refused_type_gives_its_reason() -> None:
    for model_type, reason in REFUSED.items():
        with pytest.raises(ConfigError) as raised:
            from_config({"model_type": model_type, "text_config": {}}, name="m")
        assert str(raised.value).endswith(f"is not supported: {reason}"), model_type
