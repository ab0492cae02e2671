"""What operators switch on, with real servers: answers stay those of one undivided server."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.ports import free_ports
from harness.servers import Reply, Server
from harness.vllm.models import VOCABULARY, write_model
from tests.integrations.vllm.requests import prompts

PROMPTS = prompts((33, 300), seed=61)
PAGES = ("--page-size", "16")
BACKUP = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
ROOMS = itertools.count(2**59)


@dataclass
class Model:
    path: Path
    expected: list[Reply]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return answered(write_model("llama", tmp_path_factory.mktemp("models") / "llama"))


def answered(path: Path) -> Model:
    with Server.sglang(path, *PAGES) as alone:
        alone.wait_ready(timeout_s=600)
        return Model(path, [alone.complete(prompt) for prompt in PROMPTS])


@contextmanager
def ready(*servers: Server) -> Iterator[None]:
    try:
        for server in servers:
            server.wait_ready(timeout_s=600)
        yield
    finally:
        for server in servers:
            server.stop()


def check(prefill: Server, decode: Server, expected: list[Reply]) -> None:
    """Ask both servers at once, as SGLang's router does."""
    for prompt, right in zip(PROMPTS, expected, strict=True):
        where: dict[str, Any] = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": next(ROOMS),
        }
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(prefill.complete, prompt, stream=False, **where)
            found = decode.complete(prompt, stream=False, **where)
            asked.result()
        assert found.tokens == right.tokens
        assert found.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def check_ids(server: Server) -> None:
    """Ids that the model does not have are refused. Without the plug-in they end SGLang's scheduler."""
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": server.bootstrap_port, "bootstrap_room": next(ROOMS)}
    for ids in ([1, VOCABULARY], [-1, 5]):
        body = json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, **where}).encode()
        asked = urllib.request.Request(f"{server.url}/generate", data=body, headers={"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            urllib.request.urlopen(asked, timeout=60)
        assert "input_ids: expected 0 to" in refused.value.read().decode()


def switch(server: Server, role: str) -> None:
    """Have an idle server take the other role."""
    server.flush()
    body = json.dumps({"new_role": role, "decode_cuda_graph_memory_gb": 0}).encode()
    asked = urllib.request.Request(f"{server.url}/pd_role_switch", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        found = json.load(answer)
    assert found["success"], found


def test_roles_are_switched_while_servers_run(model: Model) -> None:
    """And back. Staging buffers are ignored, which SGLang refuses to start with for other backends than its own."""
    (port,) = free_ports(1)
    common = (*PAGES, *BACKUP, "--enable-pd-role-switch", "--enable-metrics")
    one = Server.sglang(model.path, *common, mode="prefill", SGLANG_DISAGG_STAGING_BUFFER="1")
    other = Server.sglang(
        model.path, *common, "--disaggregation-bootstrap-port", str(port), mode="decode", SGLANG_DISAGG_STAGING_BUFFER="1"
    )
    other.bootstrap_port = port
    with ready(one, other):
        check(one, other, model.expected)
        for server in (one, other):
            check_ids(server)
        for _ in range(2):
            switch(one, "decode")
            switch(other, "prefill")
            check(other, one, model.expected)
            one, other = other, one
        for server in (one, other):
            assert "SGLANG_DISAGG_STAGING_BUFFER: ignored" in server.log(length=1 << 24)
            assert server.metric("sglang:kv_transfer_latency_ms_count") > 0
            server.flush()
