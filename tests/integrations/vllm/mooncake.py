"""Asks servers as the proxy of vLLM's MooncakeConnector does, which knows nothing of this connector."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from harness.servers import Server


class MooncakeProxy:
    """It asks the bootstrap server of prefill once for the names of its replicas, and from then on both servers at once. What
    prefill answers is not read.
    """

    def __init__(self, prefill: Server, decode: Server, *, bootstrap_port: int) -> None:
        self._prefill, self._decode, self._pool = prefill, decode, ThreadPoolExecutor()
        self._bootstrap = f"http://127.0.0.1:{bootstrap_port}"
        with urllib.request.urlopen(f"{self._bootstrap}/query", timeout=10) as answer:
            self.replicas = {int(rank): entry["engine_id"] for rank, entry in json.load(answer).items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._pool.shutdown()

    def ask(self, path: str, body: Mapping[str, Any], *, rank: int = 0) -> tuple[Any, Future[int]]:
        """The open answer of decode, and the status that prefill answers with."""
        transfer = f"xfer-{uuid.uuid4()}"
        headers = {"Authorization": "Bearer None", "X-Request-Id": transfer, "Content-Type": "application/json"}
        one = {name: value for name, value in body.items() if name != "stream_options"} | {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in one:
            one["max_completion_tokens"] = 1
        one["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        status = self._pool.submit(self._compute, path, one, {**headers, "X-data-parallel-rank": str(rank)})
        found = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self._bootstrap,
            "remote_engine_id": self.replicas[rank],
            "transfer_id": transfer,
        }
        return _open(self._decode, path, {**body, "kv_transfer_params": found}, headers), status

    def _compute(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> int:
        try:
            with _open(self._prefill, path, body, headers) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code


def _open(server: Server, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), dict(headers))
    return urllib.request.urlopen(request, timeout=120)
