"""Real SGLang servers, and the answers of one undivided server.

A server that is killed is replaced by one that divides the model differently, so the tests run in the order of this file:
prefill at TP 2 and decode at TP 1; then both at TP 1; then decode at TP 2.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from disagg.integrations.sglang.bootstrap import WAIT_S
from harness.ports import free_ports
from harness.servers import Reply, Server
from harness.vllm.models import write_model
from tests.integrations.sglang.kinds import KINDS, OF_ITS_OWN, ONLY_IN_PREFILL, TEXT, generate
from tests.integrations.vllm.requests import prompts
from tests.integrations.vllm.routers import Direct, HttpAnswer, answer_of, begin, differences, written
from tests.support.tcp_proxy import proxies

LENGTHS = (7, 16, 33, 250, 700, 1100)
PROMPTS = prompts(LENGTHS, seed=41)
PAGE_SIZE = 16
CHECKSUM = "--disaggregation-enable-kv-checksum"
PREFILL = ("--page-size", str(PAGE_SIZE), "--chunked-prefill-size", "256", CHECKSUM)
DECODE = ("--page-size", str(PAGE_SIZE), CHECKSUM, "--disaggregation-decode-enable-radix-cache", "--enable-cache-report")
NBYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4
"""Of the model: layers, K and V, KV heads, elements of a head, bytes of an element."""
ROOMS = itertools.count(2**62)
REVERSED_ROOMS = itertools.count(1)
REVERSING = """
from disagg.integrations.sglang.receiver import DisaggKVReceiver

def register():
    right = DisaggKVReceiver.send_metadata

    def send_metadata(self, pages, *given, **named):
        return right(self, pages[::-1] if self.bootstrap_room < 1000 else pages, *given, **named)

    DisaggKVReceiver.send_metadata = send_metadata
"""
"""A plug-in of decode that reserves the pages of small rooms in the wrong order."""


@dataclass
class Servers:
    """Prefill, decode, the proxy, and the answers of one server that does everything, to prompts and to kinds of requests."""

    model: Path
    stack: ExitStack
    prefill: Server
    decode: Server
    proxy: Server
    metrics_port: int
    expected: list[Reply]
    kinds: dict[str, HttpAnswer]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = write_model("llama", tmp_path_factory.mktemp("models") / "llama")
    package = tmp_path_factory.mktemp("plug-in")
    (package / "reversing-1.dist-info").mkdir()
    (package / "reversing-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: reversing\nVersion: 1\n")
    (package / "reversing-1.dist-info" / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nreversing = reversing:register\n"
    )
    (package / "reversing.py").write_text(REVERSING)
    path = f"{package}:{os.environ['PYTHONPATH']}"
    with Server.sglang(model) as alone:
        alone.wait_ready()
        expected = [alone.complete(prompt) for prompt in PROMPTS]
        kinds = {name: ask(alone, name) for name in (*KINDS, *ONLY_IN_PREFILL)}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("DISAGG_BACKEND", "nixl")
        patch.setenv("DISAGG_TRANSPORT", "tcp")
        prefill = stack.enter_context(Server.sglang(model, "--tp", "2", *PREFILL, mode="prefill", SGLANG_HOST_IP="::1"))
        (port,) = free_ports(1)
        patch.setenv("DISAGG_METRICS_PORT", str(port))
        decode = stack.enter_context(Server.sglang(model, *DECODE, mode="decode", PYTHONPATH=path, SGLANG_HOST_IP="::1"))
        patch.delenv("DISAGG_METRICS_PORT")
        proxy = stack.enter_context(Server.proxy(prefill.wait_ready(), decode.wait_ready()))
        yield Servers(model, stack, prefill, decode, proxy.wait_ready(), port, expected, kinds)


def ask(server: Server, name: str) -> HttpAnswer:
    """The answer to a kind of request."""
    path, body = (KINDS | ONLY_IN_PREFILL)[name]
    return Direct(server).ask(path, written(body), ())


def check(found: list[Reply], expected: list[Reply]) -> None:
    for one, right in zip(found, expected, strict=True):
        assert one.tokens == right.tokens
        assert one.logprobs == pytest.approx(right.logprobs, abs=1e-5)


@contextmanager
def load(servers: Servers) -> Iterator[None]:
    """Ask the proxy meanwhile, from its first answer on. Every answer is right in the end, whichever server was killed."""
    asked = PROMPTS * 4
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(servers.proxy.complete, prompt, stream=False, timeout_s=400) for prompt in asked]
        wait(waiting, return_when=FIRST_COMPLETED)
        yield
        check([each.result() for each in waiting], servers.expected * 4)


def check_answers(servers: Servers) -> None:
    """One by one; again, with prefixes that both servers have cached; and 20 at once."""
    for _ in range(2):
        check([servers.proxy.complete(prompt) for prompt in PROMPTS], servers.expected)
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(servers.proxy.complete, itertools.islice(itertools.cycle(PROMPTS), 20)))
    check(found, list(itertools.islice(itertools.cycle(servers.expected), 20)))
    check_free(servers)


def check_free(servers: Servers) -> None:
    """Only a server without requests empties its cache. SGLang itself ends if its pools are not free then."""
    for server in (servers.prefill, servers.decode):
        server.flush()
        server.wait_ready()


def where(servers: Servers, room: int) -> dict[str, Any]:
    """What SGLang's router adds to a request."""
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.prefill.bootstrap_port, "bootstrap_room": room}


def route(servers: Servers, room: int, prompt: list[int], **options: Any) -> Reply:
    """What SGLang's router does: the request goes to both at once, and decode answers."""
    fields = {**where(servers, room), **options}
    with ThreadPoolExecutor() as pool:
        pool.submit(servers.prefill.complete, prompt, stream=False, **fields)
        return servers.decode.complete(prompt, stream=False, **fields)


def test_tp_2_to_1(servers: Servers) -> None:
    check_answers(servers)


@pytest.mark.parametrize("is_mini", [False, True], ids=["sglang-router", "mini_lb"])
def test_sglangs_own_routers(servers: Servers, is_mini: bool) -> None:
    """The real ones. Decode computes no prompts: an answer has the state of prefill."""
    between = ("--prefill", servers.prefill.url, str(servers.prefill.bootstrap_port), "--decode", servers.decode.url)
    options = ("--pd-disaggregation", *between, *(("--mini-lb",) if is_mini else ()))
    with begin("sglang_router.launch_router", *options) as router:
        router.wait_ready(path="/health" if is_mini else "/readiness")
        found = {name: ask(router, name) for name in KINDS}
    own = set() if is_mini else OF_ITS_OWN
    assert {name for name in own if found[name].status == HTTPStatus.UNPROCESSABLE_ENTITY} == own
    different = {name: differs(servers.kinds[name], found[name]) for name in KINDS if name not in own}
    assert not any(different.values()), different
    check_free(servers)


def test_the_proxy_answers_as_one_server(servers: Servers) -> None:
    found = {name: ask(servers.proxy, name) for name in servers.kinds}
    different = {name: differs(right, found[name]) for name, right in servers.kinds.items()}
    for name in ONLY_IN_PREFILL:
        expected = of_prompts(servers.kinds[name])
        assert expected
        different[name] += differences(expected, of_prompts(found[name]), tolerance=1e-5)
    assert not any(different.values()), different
    check_free(servers)


def of_prompts(answer: HttpAnswer) -> list[Any]:
    """The log-probabilities of prompts in the last event of an answer."""
    lines = [line.removeprefix(b"data: ") for line in answer.data.splitlines() if not line.endswith(b"[DONE]")]
    last = json.loads([line for line in lines if line][-1])
    found = [each["meta_info"] for each in (last if isinstance(last, list) else [last])]
    assert all(meta["input_token_logprobs"] and meta["input_top_logprobs"] for meta in found)
    return [[meta["input_token_logprobs"], meta["input_top_logprobs"]] for meta in found]


def differs(expected: HttpAnswer, found: HttpAnswer) -> list[str]:
    """Where an answer is another one than that of one server. Of errors the status is compared."""
    if found.status != expected.status or expected.is_error:
        return [] if found.status == expected.status else [f"{expected.status} {found}"]
    return list(differences(answer_of(expected), answer_of(found), tolerance=1e-5))


def test_prefixes_are_computed_and_sent_once(servers: Servers) -> None:
    """Prefill reports the tokens that it had in its cache. The bytes that decode gets are those of the other tokens."""
    asked = prompts((250, 1100), seed=43)
    for has_prefixes in (False, True):
        before = received(servers)
        for prompt in asked:
            cached = (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE * has_prefixes
            with servers.proxy.ask(prompt, max_tokens=16, stream=False) as answer:
                usage = json.load(answer)["usage"]
            assert (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"] == cached
            before += (len(prompt) - cached) * NBYTES_PER_TOKEN
            assert received(servers) == before


def received(servers: Servers) -> float:
    """The bytes that decode has got."""
    return servers.decode.metric("disagg_request_bytes_total", port=servers.metrics_port)


def test_with_reversed_pages_the_tokens_differ(servers: Servers) -> None:
    """A control: the other tests see state in the wrong place. The first token is prefill's.

    The longest prompt is first, so that no prompt has the pages that it had before, with the right state still in them.
    """
    for length, prompt, right in reversed(list(zip(LENGTHS, PROMPTS, servers.expected, strict=True))):
        found = route(servers, next(REVERSED_ROOMS), prompt)
        assert found.tokens[0] == right.tokens[0]
        agrees = found.tokens == right.tokens and found.logprobs == pytest.approx(right.logprobs, abs=1e-5)
        assert agrees == (length <= PAGE_SIZE)
    check_free(servers)


def test_a_room_that_comes_back(servers: Servers) -> None:
    room = next(ROOMS)
    check([route(servers, room, PROMPTS[2]) for _ in range(2)], [servers.expected[2]] * 2)


def test_a_bootstrap_server_that_takes_longer_than_a_step_waits(servers: Servers) -> None:
    """As on a host far away."""
    with proxies(f"tcp://127.0.0.1:{servers.prefill.bootstrap_port}", delay_s=2 * WAIT_S) as (slow,):
        port = int(slow.address.rpartition(":")[2])
        check([route(servers, next(ROOMS), PROMPTS[2], bootstrap_port=port)], [servers.expected[2]])


def test_fields_over_which_a_scheduler_would_end(servers: Servers) -> None:
    rooms: tuple[object, ...] = (0, -1, 2**63, 2**64 + 5, [7])
    asked: list[tuple[Server, dict[str, object]]] = [
        (server, {"bootstrap_room": room}) for server in (servers.prefill, servers.decode) for room in rooms
    ]
    asked += [(servers.decode, {"bootstrap_host": host}) for host in (None, ["127.0.0.1"])]
    asked += [(servers.decode, {"bootstrap_port": port}) for port in (0, 1 << 16, [7])]
    fake = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 2**63}  # SGLang's host of requests whose state is not moved
    asked += [(server, dict(fake)) for server in (servers.prefill, servers.decode)]
    asked += [(server, {"logprobs": 129}) for server in (servers.prefill, servers.decode)]
    for server, field in asked:
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            server.complete(PROMPTS[0], stream=False, **{**where(servers, next(ROOMS)), **field})
        assert re.search("bootstrap_(room|host|port)|top_logprobs_num", refused.value.read().decode())
    wrong = (("top_logprobs_num", [5]), ("logprob_start_len", [5]), ("logprob_start_len", -5), ("text", ""))
    for server, (name, value) in itertools.product((servers.prefill, servers.decode), wrong):
        path, body = generate({"text": TEXT, "return_logprob": True, name: value, **where(servers, next(ROOMS))})
        found = Direct(server).ask(path, written(body), ())
        assert found.status == 400
        assert (b"expected at least one token" if name == "text" else f"{name}: expected a number".encode()) in found.data
    check([route(servers, next(ROOMS), each) for each in PROMPTS], servers.expected)
    check_free(servers)


def test_several_answers_to_one_prompt_fail_at_once(servers: Servers) -> None:
    """SGLang gives them one room. It aborts all of them once one has failed. One of the servers says why. The example's proxy
    asks neither, and does not try again in another room.
    """
    for room in itertools.islice(ROOMS, 3):
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(server.complete, PROMPTS[3], stream=False, timeout_s=60, n=2, **where(servers, room))
                for server in (servers.prefill, servers.decode)
            ]
            reasons = []
            for each in asked:
                with pytest.raises(urllib.error.HTTPError, match="500") as refused:
                    each.result()
                reasons.append(refused.value.read().decode())
        assert any(f"bootstrap_room {room}: another request with this room" in reason for reason in reasons), reasons
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        servers.proxy.complete(PROMPTS[3], stream=False, timeout_s=60, n=2)
    assert "n: expected 1, found 2" in refused.value.read().decode()
    check([route(servers, next(ROOMS), each) for each in PROMPTS], servers.expected)


def test_state_of_another_prompt_is_refused(servers: Servers) -> None:
    """Two requests in one room: of other tokens, as many; of the same tokens with another salt; and of fewer tokens than decode
    has in its cache, which fails on both servers.
    """
    one, other = prompts((300, 300), seed=44)
    state = "expected the state of this request's prompt"
    cases: list[tuple[list[int], dict[str, Any], str]] = [
        (other, {}, state),
        (one, {"cache_salt": "another tenant's"}, state),
        (one[:86], {}, "prompt: expected 300 tokens, as on decode, found 86 on prefill"),
    ]
    route(servers, next(ROOMS), one)
    for prompt, own, reason in cases:
        met = where(servers, next(ROOMS))
        with ThreadPoolExecutor() as pool:
            prefilled = pool.submit(servers.prefill.complete, prompt, stream=False, **met)
            with pytest.raises(urllib.error.HTTPError) as refused:
                servers.decode.complete(one, stream=False, **met, **own)
        assert reason in refused.value.read().decode()
        if len(prompt) < len(one):
            with pytest.raises(urllib.error.HTTPError, match="500"):
                prefilled.result()
    check([route(servers, next(ROOMS), PROMPTS[2])], [servers.expected[2]])
    check_free(servers)


def test_pools_are_not_released(servers: Servers) -> None:
    """Peers may write to them. The servers go on."""
    for server in (servers.prefill, servers.decode):
        for call in ("release_memory_occupation", "resume_memory_occupation"):
            asked = urllib.request.Request(f"{server.url}/{call}", data=b"{}", headers={"Content-Type": "application/json"})
            with pytest.raises(urllib.error.HTTPError, match="400") as refused:
                urllib.request.urlopen(asked, timeout=60)
            assert "expected no release of 'kv_cache'" in refused.value.read().decode()
    check([route(servers, next(ROOMS), PROMPTS[0])], servers.expected[:1])


def test_checksums_are_those_of_the_library(servers: Servers) -> None:
    """SGLang's own, which need a GPU, would end prefill here."""
    for server in (servers.prefill, servers.decode):
        assert "compared are checksums of what decode receives" in server.log(length=1 << 24)


def test_aborts(servers: Servers) -> None:
    """A request that decode has aborted fails on prefill. One that prefill has aborted waits on decode until it is aborted."""
    (prompt,) = prompts((300,), seed=42)
    room = next(ROOMS)
    abort(servers, servers.decode, "decode_transfer", room, prompt)
    with pytest.raises(urllib.error.HTTPError) as refused:
        servers.prefill.complete(prompt, stream=False, **where(servers, room))
    reason = refused.value.read().decode()  # SGLang ends it on all ranks once the first rank says so
    assert "decode does not want the request" in reason or "from another rank" in reason
    room = next(ROOMS)
    abort(servers, servers.prefill, "prefill_bootstrap", room, prompt)
    abort(servers, servers.decode, "decode_transfer", room, prompt)
    check([route(servers, next(ROOMS), each) for each in PROMPTS], servers.expected)
    check_free(servers)


def abort(servers: Servers, server: Server, queue: str, room: int, prompt: list[int]) -> None:
    """Ask only this server, and abort the request while it waits for the other in one of SGLang's queues."""
    name = f"request-{room}"
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.complete, prompt, stream=False, rid=name, **where(servers, room))
        server.wait_queued(queue)
        assert not asked.done()
        server.abort(name)
        error = asked.exception(timeout=60)
        if error is None:
            assert asked.result().tokens == []
        else:
            assert isinstance(error, urllib.error.HTTPError)
            assert "bort" in error.read().decode()


def test_pages_are_free_after_prefill_was_killed(servers: Servers) -> None:
    """All of them, before there is another prefill server. That one answers the first request."""
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(servers.decode.complete, each, stream=False, **where(servers, next(ROOMS))) for each in PROMPTS[3:]
        ]
        until = time.monotonic() + 60
        while servers.decode.num_queued("decode_transfer") < len(asked):
            assert time.monotonic() < until
        servers.prefill.kill()
        for each in asked:
            with pytest.raises(urllib.error.HTTPError, match="500"):
                each.result()
    servers.decode.flush()
    servers.decode.wait_ready()
    replaced = Server.sglang(servers.model, "--tp", "2", *PREFILL, mode="prefill", instead_of=servers.prefill)
    servers.prefill = servers.stack.enter_context(replaced).wait_ready()
    check([route(servers, next(ROOMS), each) for each in PROMPTS], servers.expected)
    check_free(servers)


def test_prefill_is_replaced_under_load(servers: Servers) -> None:
    """Decode notices the end of the process before it misses a heartbeat. The new server, at TP 1, answers the requests that
    were waiting.
    """
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        alone = pool.submit(servers.decode.complete, PROMPTS[-1], stream=False, **where(servers, next(ROOMS)))
        servers.decode.wait_queued("decode_transfer")
        stack.enter_context(load(servers))
        servers.prefill.kill()
        with pytest.raises(urllib.error.HTTPError) as failed:
            alone.result()
        assert re.search("is gone: its (process|connection) has ended", failed.value.read().decode())  # whichever it sees first
        servers.prefill = servers.stack.enter_context(
            Server.sglang(servers.model, *PREFILL, mode="prefill", instead_of=servers.prefill)
        )
    check_answers(servers)


def test_decode_is_replaced_under_load(servers: Servers) -> None:
    """The server in its place, at TP 2 with larger pages, also retracts requests while they run, with another backend of
    grammars than that of the answers that are expected.
    """
    options = ("--tp", "2", "--page-size", "64", "--enable-metrics", "--grammar-backend", "llguidance", CHECKSUM)
    retract = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    with load(servers):
        servers.decode.kill()
        servers.decode = servers.stack.enter_context(
            Server.sglang(servers.model, *options, mode="decode", instead_of=servers.decode, **retract)
        )
    check_answers(servers)
    num_retracted = servers.decode.metric("sglang:num_retracted_requests_total")
    assert num_retracted > 0
    for name in ("a long regular expression", "penalties", "min_tokens"):
        with ThreadPoolExecutor(6) as pool:
            assert [differs(servers.kinds[name], each) for each in pool.map(ask, [servers.proxy] * 6, [name] * 6)] == [[]] * 6
        before, num_retracted = num_retracted, servers.decode.metric("sglang:num_retracted_requests_total")
        assert num_retracted > before
