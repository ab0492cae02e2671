"""State is loaded only for the prompt that it is of: the same tokens, adapter weights, salt, items and embeddings."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from disagg.integrations.handoff import HandOff
from disagg.integrations.vllm.prompts import Prompts
from harness.vllm.engine import PREFILL, Answer, Engine
from harness.vllm.models import write_adapter
from tests.integrations.vllm.conftest import Start
from tests.integrations.vllm.requests import ask_both, check_equal, connect, prompts, wait_empty

LENGTH = 200


@pytest.fixture(scope="module")
def pair(model: Callable[[str], Path]) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine that take adapters and embeddings, with prefix caches and other blocks."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": 4,
        "max_lora_rank": 8,
        "enable_prompt_embeds": True,
    }
    folder = str(model("llama"))
    with Engine(folder, block_size=32, **options) as prefill, Engine(folder, block_size=64, **options) as decode:
        yield prefill, decode


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Paths of adapters by name. `copy` has the weights of `a`."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(folder / name, seed=seed)) for name, seed in {"a": 1, "b": 2, "copy": 1}.items()}


NUMBERS = itertools.count(1)
SALTS = itertools.count()


def adapter(name: str, path: str) -> dict[str, Any]:
    """The fields of a request of an adapter that is loaded for it."""
    return {"lora_request": LoRARequest(name, next(NUMBERS), path)}


def check_hand_over(
    pair: tuple[Engine, Engine], prompt: Sequence[int] | None, given: Mapping[str, Any], own: Mapping[str, Any], *, loads: bool
) -> None:
    """Hand a request with the fields `given` over to one with the fields `own`. Its answer, and that of a later plain request
    that finds its blocks, are those of an empty cache.
    """
    prefill, decode = pair
    (alone,) = decode.generate([prompt], max_tokens=6, **{**own, "cache_salt": f"alone {next(SALTS)}"})
    (first,) = prefill.generate([prompt], params=PREFILL, **given)
    assert first.params is not None
    found: list[Answer] = [decode.generate([prompt], params=params, max_tokens=6, **own)[0] for params in (first.params, None)]
    check_equal([alone, alone], found)
    assert [answer.num_external for answer in found] == [LENGTH - 1 if loads else 0, 0]
    assert found[1].num_local == LENGTH // 64 * 64
    wait_empty(prefill, decode)


@pytest.mark.parametrize(
    ("given", "own", "loads"),
    [
        (("a", "a"), ("a", "a"), True),
        (("a", "a"), ("another name", "copy"), True),
        (("a", "a"), ("b", "b"), False),
        (("a", "a"), ("a", "b"), False),
        (("a", "a"), None, False),
        (None, ("a", "a"), False),
    ],
    ids=["same", "copied files", "another adapter", "other weights", "no adapter", "adapter on decode only"],
)
def test_adapters(
    pair: tuple[Engine, Engine],
    adapters: Mapping[str, str],
    given: tuple[str, str] | None,
    own: tuple[str, str] | None,
    loads: bool,
    request: pytest.FixtureRequest,
) -> None:
    (prompt,) = prompts((LENGTH,), seed=len(request.node.name))
    fields = [{} if each is None else adapter(each[0], adapters[each[1]]) for each in (given, own)]
    check_hand_over(pair, prompt, *fields, loads=loads)


def test_adapters_if_both_servers_are_asked_at_once(pair: tuple[Engine, Engine], adapters: Mapping[str, str]) -> None:
    """Decode is not told beforehand which prompt the state will be of."""
    prefill, decode = pair
    (prompt,) = prompts((LENGTH,), seed=61)
    server, failed, own = connect(prefill, decode), decode.counts["failed_loads"], adapter("b", adapters["b"])
    (alone,) = decode.generate([prompt], max_tokens=6, cache_salt=f"alone {next(SALTS)}", **own)
    _, loading = ask_both(prefill, decode, [prompt], server=server, max_tokens=6, given=adapter("a", adapters["a"]), own=own)
    check_equal([alone], decode.wait(loading))
    assert decode.counts["failed_loads"] == failed + 1
    wait_empty(prefill, decode)


@pytest.mark.parametrize("salts", [("x", "x"), ("x", "y"), ("x", None), (None, "y")])
def test_salts(pair: tuple[Engine, Engine], salts: tuple[str | None, str | None]) -> None:
    (prompt,) = prompts((LENGTH,), seed=len(str(salts)))
    given, own = ({"cache_salt": salt} for salt in salts)
    check_hand_over(pair, prompt, given, own, loads=salts[0] == salts[1])


def test_embeddings(pair: tuple[Engine, Engine]) -> None:
    one, other = torch.randn(2, LENGTH, 256, generator=torch.Generator().manual_seed(9)) * 0.05
    for given, own in ((one, other), (one, one)):
        check_hand_over(pair, None, {"prompt_embeds": given}, {"prompt_embeds": own}, loads=given is own)


def item(identifier: str, *, at: int, mm_hash: str | None = None) -> MultiModalFeatureSpec:
    """An image of 20 tokens."""
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=at, length=20), mm_hash)


def prompts_of(*, mrope: bool = True, caching: bool = True, **options: Any) -> Prompts:
    """Those of a model that takes images, by vLLM's options for them."""
    model = SimpleNamespace(multimodal_config=MultiModalConfig(**options), uses_mrope=mrope)
    config: Any = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=caching))
    return Prompts(config)


def request_of(*items: MultiModalFeatureSpec) -> Request:
    return Request("r", list(range(64)), SamplingParams(max_tokens=1), pooling_params=None, mm_features=list(items))


def test_items_that_have_no_name_or_need_the_encoder_are_not_handed_over() -> None:
    """VLLM counts items that it need not hash. It corrects positions by the encoder's output if it has pruned a video."""
    pictured, plain = request_of(item("renderer0-mm-1-image-0", at=8)), request_of()
    for prompts_ in (prompts_of(mm_processor_cache_gb=0, caching=False), prompts_of(video_pruning_rate=0.5)):
        assert prompts_.problem(pictured)
        assert not prompts_.problem(plain)
        assert prompts_.digest(pictured, 64) != prompts_.digest(pictured, 64)
        assert prompts_.digest(pictured, 8) == prompts_.digest(plain, 8)
        assert prompts_.digest(plain, 64) == prompts_of().digest(plain, 64)
    for prompts_ in (
        prompts_of(),
        prompts_of(mm_processor_cache_gb=0),
        prompts_of(caching=False),
        prompts_of(video_pruning_rate=0.5, mrope=False),
    ):
        assert not prompts_.problem(pictured)
        assert prompts_.digest(pictured, 64) == prompts_.digest(pictured, 64)


def test_digests_name_how_items_become_embeddings() -> None:
    request, plain = request_of(item("one", at=8)), request_of()
    given: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"image_mean": [0.1]}},
        {"mm_processor_kwargs": {"image_mean": [0.2]}},
        {"video_pruning_rate": 0.5, "mrope": False},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2", "mrope": False},
    ]
    every = [prompts_of(**options) for options in given]
    assert len({prompts_.digest(request, 64) for prompts_ in every}) == len(given)
    assert len({prompts_.digest(plain, 64) for prompts_ in every}) == 1
    reordered = prompts_of(mm_processor_kwargs={"b": 1, "a": 2}).digest(request, 64)
    assert reordered == prompts_of(mm_processor_kwargs={"a": 2, "b": 1}).digest(request, 64)


def test_adapters_of_a_tower_have_other_names_on_each_server() -> None:
    """VLLM puts the adapter's name into an item's identifier; its weights are in the digest."""
    one, other = (request_of(item(f"{name}:hash", at=8, mm_hash="hash")) for name in ("mine", "yours"))
    assert prompts_of().digest(one, 64) == prompts_of().digest(other, 64)


def test_digest_differs_whenever_vllms_own_hashes_differ() -> None:
    """Of its blocks, over every pair of requests. Only adapters differ otherwise: vLLM takes their names, not their weights."""
    init_none_hash(sha256)
    hasher, embeddings = get_request_block_hasher(16, sha256), torch.randn(3, 64, 8)
    tokens = list(range(64))
    variants: list[dict[str, Any]] = [
        {},
        {"prompt_token_ids": [*tokens[:40], 7, *tokens[41:]]},
        *({"cache_salt": salt} for salt in ("x", "y")),
        *({"mm_features": items} for items in ([item("one", at=8)], [item("two", at=8)], [item("one", at=9)])),
        {"mm_features": [item("one", at=8), item("two", at=30)]},
        {"mm_features": [item("one", at=8), item("two", at=31)]},
        *({"prompt_embeds": rows, "prompt_token_ids": None} for rows in embeddings),
        {"prompt_embeds": embeddings[0].bfloat16(), "prompt_token_ids": None},
    ]
    every, prompt_digests = [], prompts_of()
    for fields in variants:
        given = {"prompt_token_ids": tokens, **fields}
        every.append(
            Request("r", sampling_params=SamplingParams(max_tokens=1), pooling_params=None, block_hasher=hasher, **given)
        )
    for one, other in itertools.product(every, repeat=2):
        for length in (16, 32, 48, 64):
            is_same = one.block_hashes[length // 16 - 1] == other.block_hashes[length // 16 - 1]
            assert (prompt_digests.digest(one, length) == prompt_digests.digest(other, length)) is is_same


def test_embeddings_have_nothing_in_common_with_a_kept_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of embeddings is kept. A client that names all the digests of its own makes no server compute them."""
    num_tokens, prompts_ = 64 * 32, prompts_of()
    embeddings = torch.randn(num_tokens, 8)
    request = Request("r", None, SamplingParams(max_tokens=1), pooling_params=None, prompt_embeds=embeddings)
    kept = HandOff(
        remote_engine_id="there",
        remote_address="tcp://127.0.0.1:2",
        remote_request_id=32 * "0",
        remote_num_tokens=num_tokens - 1,
        remote_beginnings="".join(digest for _, digest in prompts_.beginnings(request, num_tokens - 1)),
        remote_keep_s=60.0,
    )
    digested: list[int] = []
    blake2b = hashlib.blake2b

    def counting(data: bytes = b"", **options: Any) -> Any:
        digested.append(len(data))
        return blake2b(data, **options)

    monkeypatch.setattr(hashlib, "blake2b", counting)
    common = prompts_.num_common(request, kept, num_tokens - 1)
    assert (common, sum(digested)) == (0, 0), f"the prompt has {embeddings.nbytes} bytes"


def test_a_prompt_of_tokens_and_embeddings_is_not_cut(start: Start) -> None:
    """Of a model with windows prefill computes all tokens but the last, and vLLM ends if a prompt has more embeddings."""
    prefill = start("gemma3", enable_prompt_embeds=True).wait_ready()
    (tokens,) = prompts((LENGTH,), seed=6)
    mixed = {
        "prompt_embeds": torch.randn(LENGTH, 256, generator=torch.Generator().manual_seed(9)) * 0.05,
        "prompt_is_token_ids": [not 20 <= position < 40 for position in range(LENGTH)],
    }
    (alone,) = prefill.generate([tokens], max_tokens=1, **mixed)
    (answer,) = prefill.generate([tokens], params=PREFILL, max_tokens=1, **mixed)
    check_equal([alone], [answer])
    assert answer.params == {"do_remote_prefill": False, "do_remote_decode": False}
    where = {"remote_engine_id": "there", "remote_address": "tcp://127.0.0.1:2", "remote_request_id": 32 * "0"}
    (computed,) = prefill.generate([tokens], params={"do_remote_prefill": True, **where}, max_tokens=1, **mixed)
    check_equal([alone], [computed])
    wait_empty(prefill)
    assert prefill.counts["refused_hand_overs"] == 1
