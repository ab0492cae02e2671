"""Every causal and multimodal model type of transformers is described, or refused with a reason."""

from __future__ import annotations

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


def test_every_type_is_described_or_refused() -> None:
    assert sorted(TYPES - DESCRIBED - set(REFUSED)) == []
    assert sorted(DESCRIBED & set(REFUSED)) == []


def test_every_described_type_is_tested() -> None:
    assert sorted(DESCRIBED - {*CASES, *NESTED, *IN_EXAMPLES, *IN_VLLM}) == []
    assert {*EVERY_RUN, *NESTED.values()} <= set(CASES)


def test_a_refused_type_gives_its_reason() -> None:
    for model_type, reason in REFUSED.items():
        with pytest.raises(ConfigError) as raised:
            from_config({"model_type": model_type, "text_config": {}}, name="m")
        assert str(raised.value).endswith(f"is not supported: {reason}"), model_type
