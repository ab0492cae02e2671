"""Real SGLang servers: prefill at TP 2, decode at TP 1, and the tokens of one undivided server."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.sglang.servers import Server, free_port, route, write_llama

NUM_TOKENS = 16
LENGTHS = (7, 16, 33, 250, 700, 1100)
DECODE = ("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor")
BACKEND = ("--disaggregation-transfer-backend", "disagg", "--page-size", "16")

Answers = list[tuple[list[int], list[float]]]


def prompts() -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(3, 512) for _ in range(length)] for length in LENGTHS]


def read(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    assert "error" not in answer, answer
    logprobs = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], logprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The tokens of one server that does everything."""
    server = Server(model, tmp_path_factory.mktemp("undivided") / "log")
    try:
        server.wait()
        return [read(server.generate(prompt, NUM_TOKENS)) for prompt in prompts()]
    finally:
        server.stop()


@pytest.fixture(scope="module")
def decode(model: Path, expected: Answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A decode server, started once the undivided server has ended."""
    server = Server(model, tmp_path_factory.mktemp("decode") / "log", *DECODE, *BACKEND, DISAGG_BACKEND="nixl")
    try:
        yield server
    finally:
        server.stop()


def prefill(model: Path, log: Path, port: int, *options: str, **environ: str) -> Server:
    cores = itertools.cycle(map(str, sorted(os.sched_getaffinity(0))))
    environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(itertools.islice(cores, 2 if "--tp" in options else 1))
    mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    return Server(model, log, *mode, *BACKEND, "--chunked-prefill-size", "256", *options, **environ)


def test_tokens_of_a_pair_equal_one_server(model: Path, expected: Answers, decode: Server, tmp_path: Path) -> None:
    port = free_port()
    server = prefill(model, tmp_path / "prefill", port, "--tp", "2", DISAGG_BACKEND="nixl")
    try:
        server.wait()
        decode.wait()
        rooms = iter(range(2**62, 2**62 + 1000))
        one_by_one = [read(route(server, decode, port, next(rooms), prompt, NUM_TOKENS)) for prompt in prompts()]
        check(one_by_one, expected, server, decode)
        again = [read(route(server, decode, port, next(rooms), prompt, NUM_TOKENS)) for prompt in prompts()]  # prefix hits
        check(again, expected, server, decode)
        at_once: dict[int, tuple[list[int], list[float]]] = {}

        def ask(number: int, room: int) -> None:
            prompt = prompts()[number % len(LENGTHS)]
            at_once[number] = read(route(server, decode, port, room, prompt, NUM_TOKENS))

        threads = [threading.Thread(target=ask, args=(number, next(rooms))) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(
            [at_once[number] for number in range(20)], [expected[number % len(LENGTHS)] for number in range(20)], server, decode
        )
    finally:
        server.stop()


def check(found: Answers, expected: Answers, *servers: Server) -> None:
    for (tokens, logprobs), (right_tokens, right_logprobs) in zip(found, expected, strict=True):
        assert tokens == right_tokens, "\n".join(server.tail() for server in servers)
        assert logprobs == pytest.approx(right_logprobs, abs=1e-4)


LOSSY = """
from disagg.testing.backend_faults import BackendFaults, inject

start = inject("nixl", BackendFaults(lose=1.0))  # an engine that says that bytes have landed, and sends none
"""


def test_without_the_bytes_the_tokens_differ(model: Path, expected: Answers, decode: Server, tmp_path: Path) -> None:
    """A control: the test above sees damaged state."""
    package = tmp_path / "package"
    (package / "lossy-1.dist-info").mkdir(parents=True)
    (package / "lossy-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: lossy\nVersion: 1\n")
    (package / "lossy-1.dist-info" / "entry_points.txt").write_text("[disagg.backends]\nlossy = lossy:start\n")
    (package / "lossy.py").write_text(LOSSY)
    port = free_port()
    server = prefill(
        model, tmp_path / "prefill", port, DISAGG_BACKEND="lossy", PYTHONPATH=f"{package}:{os.environ['PYTHONPATH']}"
    )
    try:
        server.wait()
        decode.wait()
        found = [read(route(server, decode, port, 2**61 + n, prompt, NUM_TOKENS)) for n, prompt in enumerate(prompts())]
        assert [tokens[0] for tokens, _ in found] == [tokens[0] for tokens, _ in expected]  # the first is prefill's
        assert all(tokens != right for (tokens, _), (right, _) in zip(found, expected, strict=True))
    finally:
        server.stop()
