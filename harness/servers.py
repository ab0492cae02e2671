"""HTTP servers of vLLM and SGLang and the example's proxy as processes, and a client for them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.ports import free_ports
from harness.vllm.engine import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
NO_OVERLAP = "--disable-overlap-schedule"
SGLANG_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""What SGLang's servers on a machine without a GPU need."""


OURS = {
    "kv_connector": "DisaggConnector",
    "kv_connector_module_path": "disagg.integrations.vllm",
    "kv_role": "kv_both",
}
"""This library's connector, in vLLM's `KVTransferConfig`."""


def transfer_config(extra: Mapping[str, Any] | None = None, *, module: str = "disagg.integrations.vllm") -> str:
    """The value of `--kv-transfer-config`. `module` has the connector."""
    given = {"kv_connector_module_path": module, "kv_connector_extra_config": dict(extra or {})}
    return json.dumps({**OURS, "kv_load_failure_policy": "recompute", **given})


@dataclass
class Reply:
    """The answer to one prompt: its token ids and logprobs, and the time until the first one in seconds. `is_broken`: its
    stream has broken off before `[DONE]`.
    """

    tokens: list[int]
    logprobs: list[float]
    first_token_s: float
    is_broken: bool = False


class Server:
    """A process that serves HTTP at `url`, and is stopped at the end of a `with` block."""

    def __init__(self, command: Sequence[str], port: int, environ: Mapping[str, str] = ENVIRONMENT) -> None:
        self.port, self.url, self.bootstrap_port = port, f"http://127.0.0.1:{port}", 0
        self._log = tempfile.NamedTemporaryFile(mode="w+", prefix="server-", suffix=".log")  # noqa: SIM115  (until it is stopped)
        self._process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environ}, stdout=self._log, stderr=self._log, start_new_session=True
        )

    @classmethod
    def vllm(
        cls,
        model: Path,
        *options: str,
        extra: Mapping[str, Any] | None = None,
        instead_of: Server | None = None,
        **environ: str,
    ) -> Server:
        """A vLLM server of a model in float32, with 256 blocks. It takes the port of `instead_of`, which has ended. Of options
        that are given twice the last counts.
        """
        port = free_ports(1)[0] if instead_of is None else instead_of.port
        common = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1536", "--num-gpu-blocks-override", "256")
        return cls(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)),
                *("--served-model-name", "model", "--gpu-memory-utilization", "0.05", "--no-enable-prefix-caching"),
                *("--kv-transfer-config", transfer_config(extra), *common, *options),
            ],
            port,
            {**ENVIRONMENT, **environ},
        )

    @classmethod
    def sglang(
        cls, model: Path, *options: str, mode: str | None = None, instead_of: Server | None = None, **environ: str
    ) -> Server:
        """An SGLang server of a model in float32 that serves 8,192 tokens. `mode` is `prefill`, `decode`, or none for both.

        It takes the ports of the server `instead_of`, which has ended. `SGLANG_PYTHON` names the interpreter of its
        environment, if it is not this one.
        """
        port, bootstrap_port = free_ports(2) if instead_of is None else (instead_of.port, instead_of.bootstrap_port)
        disaggregation = {
            None: (),
            "prefill": ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap_port)),
            "decode": ("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor"),
        }[mode]
        backend = () if mode is None else ("--disaggregation-transfer-backend", "disagg")
        # With overlap SGLang's prefill makes a CUDA event for a cached prefix.
        steps = (NO_OVERLAP,) if mode == "prefill" else ()
        # A server does not start if others take more than half of the free memory meanwhile.
        common = ("--dtype", "float32", "--max-total-tokens", "8192", "--mem-fraction-static", "0.5", "--skip-server-warmup")
        idle = "--sleep-on-idle"  # otherwise every idle rank takes a whole core
        given = dict(itertools.pairwise(options))
        num_ranks = int(given.get("--tp", 1)) * int(given.get("--pp-size", 1))
        python = os.environ.get("SGLANG_PYTHON", sys.executable)
        server = cls(
            [
                *(python, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
                *("--device", "cpu", "--attention-backend", "torch_native", idle, *common, *steps),
                *(*disaggregation, *backend, *options),
            ],
            port,
            {**SGLANG_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": _cores(num_ranks), **environ},
        )
        server.bootstrap_port = bootstrap_port
        return server

    @classmethod
    def proxy(cls, prefill: Server, decode: Server, *options: str) -> Server:
        """The example's proxy."""
        (port,) = free_ports(1)
        command = [sys.executable, "examples/pd_proxy.py", "--retry-s", "300", "--prefill", prefill.url, "--decode", decode.url]
        return cls([*command, "--port", str(port), *options], port)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self, *, length: int = 6000) -> str:
        """The end of what the process has written, of at most `length` characters."""
        return Path(self._log.name).read_text(errors="replace")[-length:]

    def wait_ready(self, *, path: str = "/v1/models", timeout_s: float = 240.0) -> Server:
        """Wait until it answers, without an error. Raises `RuntimeError` with the end of its log if it does not."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}{path}", timeout=5):
                return self
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.url} does not answer: {self.log()}")
            time.sleep(0.3)

    def wait_ended(self, *, timeout_s: float) -> int | None:
        """Its exit status; `None` if it still runs after this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def complete(self, prompt: Sequence[int], *, max_tokens: int = 16, stream: bool = True, **options: Any) -> Reply:
        """The greedy answer to a prompt of token ids. Raises `urllib.error.HTTPError` for an error."""
        reply, begun_s = Reply([], [], 0.0), time.monotonic()
        with self.ask(prompt, max_tokens=max_tokens, stream=stream, **options) as answer:
            for choice in _choices(answer, reply) if stream else json.load(answer)["choices"]:
                reply.first_token_s = reply.first_token_s or time.monotonic() - begun_s
                if choice.get("logprobs"):
                    reply.tokens += choice["token_ids"]
                    reply.logprobs += choice["logprobs"]["token_logprobs"]
        return reply

    def ask(
        self, prompt: Sequence[int], *, timeout_s: float = 120, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Any:
        """The open answer to a greedy completion with log-probabilities and token ids."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(completion(prompt, **fields)).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        return urllib.request.urlopen(request, timeout=timeout_s)

    def metrics(self, *, port: int | None = None) -> str:
        """All metrics, as Prometheus reads them. `port`: those of the rank that serves them there."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port or self.port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def metric(self, name: str, *, port: int | None = None, label: str = "") -> float:
        """The sum of a metric's values, of those with a label such as `source="p2p"`. Raises `KeyError` if there is none."""
        labels = rf"{{.*{re.escape(label)}.*}}" if label else "(?:{.*})?"
        found = re.findall(rf"^{re.escape(name)}{labels} (\S+)$", self.metrics(port=port), re.MULTILINE)
        if not found:
            raise KeyError(name)
        return sum(map(float, found))

    def num_moved(self) -> float:
        """VLLM's own count of prompt tokens that have come from other servers, without those of failed loads."""
        return self.metric("vllm:prompt_tokens_by_source_total", label='source="external_kv_transfer"')

    def metric_from(self, name: str, least: float, *, label: str = "", timeout_s: float = 20.0) -> float:
        """`metric`, once it is at least `least`, or what it is after a while. A server may answer before it counts."""
        until = time.monotonic() + timeout_s
        while (found := self.metric(name, label=label)) < least and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def num_queued(self, queue: str) -> int:
        """How many requests of an SGLang server are in a queue of its disaggregation, such as `decode_transfer`."""
        with urllib.request.urlopen(f"{self.url}/v1/loads?include=disagg", timeout=10) as answer:
            return sum(rank["disaggregation"][f"{queue}_queue_reqs"] for rank in json.load(answer)["loads"])

    def wait_queued(self, queue: str, *, timeout_s: float = 60.0) -> None:
        """Wait until a request is in such a queue. Raises `TimeoutError` if none is in time."""
        until = time.monotonic() + timeout_s
        while not self.num_queued(queue):
            if time.monotonic() > until:
                raise TimeoutError(f"{self.url}: nothing is in the queue {queue}")
            time.sleep(0.02)

    def flush(self) -> None:
        """Empty an SGLang server's prefix cache. Raises `urllib.error.HTTPError` if it still has requests after a while."""
        with urllib.request.urlopen(f"{self.url}/flush_cache?timeout=60", timeout=90):
            pass

    def abort(self, request: str) -> None:
        """Abort a request of an SGLang server, which was asked with this `rid`."""
        body = json.dumps({"rid": request}).encode()
        asked = urllib.request.Request(f"{self.url}/abort_request", data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=10):
            pass

    def kill(self) -> None:
        """End the process and all that it has started with SIGKILL."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the process and all that it has started."""
        for number, timeout_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()


def completion(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """The body of a request for a greedy completion with log-probabilities and token ids."""
    body = {"model": "model", "prompt": list(prompt), "temperature": 0, "ignore_eos": True}
    return {**body, "logprobs": 1, "return_token_ids": True, **fields}


def _cores(num_ranks: int) -> str:
    """A core for each rank of an SGLang server, in turn. Otherwise all ranks bind their threads to the same ones."""
    cores = itertools.cycle(map(str, sorted(os.sched_getaffinity(0))))
    return "|".join(itertools.islice(cores, num_ranks))


@contextlib.contextmanager
def vllm_pair(model: Path) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill at TP 1 with blocks of 32, decode at TP 2 with blocks of 64, and the proxy, all ready.

    A small machine may stop a server for 9 s at its first request, which must not look like its loss.
    """
    patient = {"connection_limits": {"heartbeat_timeout_s": 30.0}}
    with (
        Server.vllm(model, "--block-size", "32", extra=patient) as prefill,
        Server.vllm(model, "--tensor-parallel-size", "2", "--block-size", "64", extra=patient) as decode,
        Server.proxy(prefill, decode) as proxy,
    ):
        yield prefill.wait_ready(), decode.wait_ready(), proxy.wait_ready()


def _choices(answer: Any, reply: Reply) -> Iterator[dict[str, Any]]:
    """The choices in a stream of events. Only `is_broken` shows a connection that ends early."""
    reply.is_broken = True
    for line in answer:
        text = line.decode().strip().removeprefix("data: ")
        if text == "[DONE]":
            reply.is_broken = False
        elif text:
            yield from json.loads(text)["choices"]
