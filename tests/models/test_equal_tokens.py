"""A prefill and a decode instance that divide a model differently give the undivided model's tokens and logits.

For every architecture in `CASES`: transformers runs the prompt, the state in its cache is cut as the description says and moved
over NIXL to the ranks of another process, and transformers decodes from a cache that holds nothing but the moved bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from disagg.models import ModelSpec, from_config
from tests.backends.conftest import require_engine
from tests.support.architectures import CASES, EVERY_RUN
from tests.support.moved_state import Array, DecodeProcess

require_engine("nixl._bindings", "nixl")
torch = pytest.importorskip("torch")

from tests.support.real_models import Network, build, every_tensor, file_of, small, tensors  # noqa: E402

NUM_TOKENS, NUM_NEW = 11, 4
State = dict[tuple[str, int, str], Array]


@pytest.fixture(scope="module")
def decode_process() -> Iterator[DecodeProcess]:
    with closing(DecodeProcess()) as process:
        yield process


def held(cache: Any, spec: ModelSpec) -> State:
    """A copy of all state in `cache`."""
    views = tensors(cache, spec, NUM_TOKENS)
    return {key: torch.cat(parts, dim=-1).contiguous().numpy().copy() for key, parts in views.items()}


def refilled(cache: Any, spec: ModelSpec, state: Mapping[tuple[str, int, str], Array]) -> Any:
    """A copy of `cache` whose tensors are not numbers, except for those of `state`."""
    made = copy.deepcopy(cache)
    views = tensors(made, spec, NUM_TOKENS)
    for layer in made.layers:
        for _, tensor in every_tensor(vars(layer)):
            tensor.fill_(torch.nan)
    for key, parts in views.items():
        array, start = torch.from_numpy(state[key]), 0
        for part in parts:
            part.copy_(array[..., start : start + part.shape[-1]])
            start += part.shape[-1]
    return made


def decode(network: Network, cache: Any, first: Any) -> tuple[list[int], Any]:
    """Greedy tokens after the first one, and their logits."""
    tokens, logits = [int(first)], []
    for _ in range(NUM_NEW):
        logits.append(network.step(torch.tensor(tokens[-1:]), cache))
        tokens.append(int(logits[-1].argmax()))
    return tokens, torch.stack(logits)


def damaged(state: State, name: str) -> State:
    """The state with one byte of the last layer's last tensor of one kind changed: the highest of the last value."""
    key = [key for key in state if key[0] == name][-1]
    array = state[key].copy()
    array.view(np.uint8).reshape(-1)[-1] ^= 0x7F if name.startswith("index") else 0xC0
    return {**state, key: array}


@pytest.mark.parametrize("model_type", [pytest.param(t, marks=[] if t in EVERY_RUN else [pytest.mark.nightly]) for t in CASES])
def test_moved_state_gives_the_same_tokens_and_logits(model_type: str, decode_process: DecodeProcess) -> None:
    config = small(model_type)
    file = file_of(config, model_type)
    spec = from_config(file, name=model_type)
    network = build(config)
    cache = network.new_cache()
    first = network.step(torch.randint(3, 60, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)), cache).argmax()
    state = held(cache, spec)
    moved = decode_process.move(file, state, name=model_type, num_tokens=NUM_TOKENS)
    assert {key: array.tobytes() for key, array in moved.items()} == {key: array.tobytes() for key, array in state.items()}
    filled = refilled(cache, spec, moved)
    broken = {s.name: refilled(cache, spec, damaged(moved, s.name)) for s in spec.states}
    expected, logits = decode(network, cache, first)
    assert torch.isfinite(logits).all()
    tokens, found = decode(network, filled, first)
    assert tokens == expected
    assert torch.equal(found, logits)
    for name, wrong in broken.items():
        assert not torch.equal(decode(network, wrong, first)[1], logits), f"{name}: a damaged byte changes nothing"
