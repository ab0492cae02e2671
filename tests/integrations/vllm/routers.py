"""Routers that are no part of this library, and what they make of a request: real ones as processes, others replayed.

A replay asks both servers for the same things in the same order as the router's own code. It serves no HTTP, and leaves out
what the servers cannot notice: retries, timeouts, traces, metrics and the choice among several servers.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from harness.ports import free_ports
from harness.servers import ROOT, Server

JSON = {"Content-Type": "application/json"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, GENERATE = "/v1/messages", "/inference/v1/generate"
NOBODY: Mapping[str, Any] = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
TIMEOUT_S = 120.0
OK = 200


@dataclass(frozen=True)
class HttpAnswer:
    """The answer to a request: its HTTP status and its body."""

    status: int
    data: bytes

    @property
    def is_error(self) -> bool:
        return not OK <= self.status < OK + 100


class Router(Protocol):
    """Something that answers requests in place of one undivided server."""

    def ask(self, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> HttpAnswer:
        """The whole answer to a POST request."""


class Direct:
    """A server that is asked without a router, or a router that is a server itself."""

    def __init__(self, server: Server) -> None:
        self.port = server.port

    def ask(self, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> HttpAnswer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.putrequest("POST", path)
            for name, value in (*JSON.items(), *headers, ("Content-Length", str(len(body)))):
                connection.putheader(name, value)  # several headers may have one name
            connection.endheaders(body)
            answer = connection.getresponse()
            return HttpAnswer(answer.status, answer.read())
        finally:
            connection.close()


def begin(module: str, *options: str) -> Server:
    """A real router as a process. Skips the test if it cannot be installed."""
    environ = {**os.environ, "PYTHON": sys.executable}
    script = subprocess.run(["scripts/routers_env.sh"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if script.returncode:
        pytest.skip(script.stderr)
    path = os.pathsep.join(filter(None, (script.stdout.strip(), os.environ.get("PYTHONPATH"))))
    port, metrics_port = free_ports(2)
    ports = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port))
    return Server([sys.executable, "-W", "ignore", "-m", module, *options, *ports], port, {"PYTHONPATH": path})


class Sidecar:
    """The sidecar that llm-d runs beside each decode server (llm-d/llm-d-router, `pkg/sidecar/proxy`, commit 05457890), with
    its connector `nixlv2`. A header of its scheduler names the prefill server, here for every request.

    Of decode's answer it changes `usage.prompt_tokens_details` only.
    """

    limits: Mapping[str, tuple[str, ...]] = {
        CHAT: ("max_tokens", "max_completion_tokens"),
        COMPLETIONS: ("max_tokens",),
        MESSAGES: ("max_tokens",),
        RESPONSES: ("max_output_tokens",),
        GENERATE: ("max_tokens",),
    }
    """The paths that are divided, and the fields there that limit an answer's length."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self._prefill, self._decode = Direct(prefill), Direct(decode)

    def ask(self, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> HttpAnswer:
        if path not in self.limits:
            return self._decode.ask(path, body, headers)
        given = read_object(body)
        return HttpAnswer(400, b"{}") if given is None else self._divide(path, given, headers)

    def _divide(self, path: str, given: dict[str, Any], headers: Sequence[tuple[str, str]]) -> HttpAnswer:
        both = [*headers, ("X-Request-Id", str(uuid.uuid4()))]  # beside that of the client
        params = {"do_remote_decode": True, "do_remote_prefill": False, **NOBODY}
        first = self._prefill.ask(path, written(self._one_token(path, given, params)), both)
        if first.is_error:
            return first
        found = json.loads(first.data, parse_int=float).get("kv_transfer_params")  # Go reads every number as a float
        return self._decode.ask(path, written({**given, "kv_transfer_params": found}), both)

    def _one_token(self, path: str, given: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """What prefill is asked for."""
        one = {**given, "kv_transfer_params": params, "stream": False}
        one.pop("stream_options", None)
        limited = one
        if path == GENERATE:
            limited = one["sampling_params"] = dict(one.get("sampling_params") or {})
        limited |= dict.fromkeys(self.limits[path], 1)
        limited.pop("min_tokens", None)
        if path == RESPONSES:
            one["store"] = False
        return one


class SidecarAtOnce(Sidecar):
    """The same with the connector `mooncake`, which asks both servers at once and does not read what prefill answers."""

    def __init__(self, prefill: Server, decode: Server, *, bootstrap_port: int) -> None:
        super().__init__(prefill, decode)
        self._bootstrap = f"http://127.0.0.1:{bootstrap_port}"
        connection = http.client.HTTPConnection("127.0.0.1", bootstrap_port, timeout=TIMEOUT_S)
        connection.request("GET", "/query")
        self._replicas = {rank: entry["engine_id"] for rank, entry in json.load(connection.getresponse()).items()}
        connection.close()

    def _divide(self, path: str, given: dict[str, Any], headers: Sequence[tuple[str, str]]) -> HttpAnswer:
        transfer = f"xfer-{uuid.uuid4()}"
        rank, engine_id = next(iter(self._replicas.items()))
        params = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": transfer}
        one = written(self._one_token(path, given, params))
        found = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_bootstrap_addr": self._bootstrap,
            "remote_engine_id": engine_id,
        }
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._prefill.ask, path, one, [*headers, ("X-data-parallel-rank", rank)])
            return self._decode.ask(path, written({**given, "kv_transfer_params": found}), headers)


class ProductionStack:
    """The router of production-stack (vllm-project/production-stack, `vllm_router/services/request_service/request.py`, commit
    a6c01db0) with `--routing-logic disaggregated_prefill_orchestrated`. It divides every path that it knows, also those that
    compute no answer.

    Errors reach the client with the server's status, and the server's text within another one.
    """

    paths = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/embeddings", "/tokenize")
    """Of those that it knows, the ones that are tested."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self._prefill, self._decode = Direct(prefill), Direct(decode)

    def ask(self, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> HttpAnswer:
        if path not in self.paths:
            return HttpAnswer(404, b"{}")
        given = read_object(body)
        if given is None:
            return HttpAnswer(500, b"Internal Server Error")
        own = [("X-Request-Id", dict(headers).get("X-Request-Id") or str(uuid.uuid4()))]
        one = {**given, "max_tokens": 1, "stream": False}
        if "max_completion_tokens" in one:
            one["max_completion_tokens"] = 1
        one["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **NOBODY}
        one.pop("stream_options", None)
        first = self._prefill.ask(path, written(one), own)
        if first.is_error:
            return HttpAnswer(first.status, written({"error": f"Prefill failed: {first.data.decode()}"}))
        asked = dict(given)
        if found := json.loads(first.data).get("kv_transfer_params"):
            asked["kv_transfer_params"] = {**found, "remote_host": "127.0.0.1"}
        answer = self._decode.ask(path, written(asked), own)
        if answer.is_error:
            return HttpAnswer(answer.status, written({"error": f"Decode failed: {answer.data.decode()}"}))
        return answer


def read_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object that a body is; `None` if it is none."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def written(body: Any) -> bytes:
    """A body in JSON."""
    return json.dumps(body).encode()


CHANGING = {
    "id",
    "sequence_number",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "call_id",
    "system_fingerprint",
    "request_id",
}
"""What differs between two answers of one server."""
OF_HAND_OVERS = {"kv_transfer_params", "prompt_tokens_details", "input_tokens_details", "meta_info"}
"""What tells of hand-overs, caches and times."""
ADDED = {"text", "content", "arguments", "reasoning", "reasoning_content", "delta"}
"""Texts of which events of a stream have parts."""


def answer_of(reply: HttpAnswer) -> Any:
    """What was answered, for a comparison: without names, times and caches, with the parts of a stream put together, since a
    server may join several of its events. Each event of SGLang's `/generate` has the whole answer so far.
    """
    lines = reply.data.splitlines()
    if not any(line.startswith(b"data: ") for line in lines):
        return plain(json.loads(reply.data))
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith(b"data: {"):
            part = json.loads(line[len(b"data: ") :])
            found = longer(found, plain(part)) if "meta_info" in part else joined(found, plain(part))
    return {**found, "is_done": b"data: [DONE]" in lines}


def longer(found: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The answer of an event, which goes on where the one before it ended."""
    for name in found.keys() & {"text", "output_ids"}:
        assert other[name][: len(found[name])] == found[name], (name, found, other)
    return other


def plain(found: Any) -> Any:
    """Without fields that differ or are null."""
    if isinstance(found, dict):
        left_out = CHANGING | OF_HAND_OVERS
        return {name: plain(value) for name, value in found.items() if name not in left_out and value is not None}
    return [plain(value) for value in found] if isinstance(found, list) else found


def joined(one: Any, other: Any, name: str = "") -> Any:
    """Two parts of a stream as one. Elements of lists with an `index` are joined with those of the same one."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{key: joined(one[key], value, key) if key in one else value for key, value in other.items()}}
    if isinstance(one, list) and isinstance(other, list):
        if name not in ("choices", "tool_calls"):
            return one + other
        found = {each["index"]: each for each in one}
        for each in other:
            found[each["index"]] = joined(found.get(each["index"], {}), each)
        return [found[index] for index in sorted(found)]
    return one + other if isinstance(one, str) and isinstance(other, str) and name in ADDED else other


def differences(expected: Any, found: Any, at: str = "", *, tolerance: float = 1e-4) -> Iterator[str]:
    """Where two answers differ, by more than `tolerance` if they are numbers."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            yield from differences(expected.get(name), found.get(name), f"{at}.{name}", tolerance=tolerance)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{at}[{index}]", tolerance=tolerance)
    elif isinstance(expected, float) and isinstance(found, float):
        if abs(expected - found) > tolerance:
            yield f"{at}: expected {expected}, found {found}"
    elif expected != found:
        yield f"{at}: expected {expected!r:.200}, found {found!r:.200}"
