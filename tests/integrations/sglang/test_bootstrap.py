"""Bootstrap servers, of which some do not answer, or answer with anything."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from disagg import PeerUnreachable
from disagg.integrations.sglang.bootstrap import MAX_NBYTES, BootstrapServers, Prefill, Served, named

INSTANCE = {
    "attn_tp_size": 1,
    "attn_cp_size": 1,
    "dp_size": 2,
    "pp_size": 1,
    "page_size": 16,
    "kv_cache_dtype": "auto",
    "follow_bootstrap_room": True,
}


@contextmanager
def server(rows: dict[str, object], *, may_answer: threading.Event | None = None) -> Iterator[str]:
    """Answers with what `rows` has for a data-parallel rank, once it may."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if may_answer is not None:
                may_answer.wait(60)
            row = rows[parse_qs(urlsplit(self.path).query)["prefill_dp_rank"][0]]
            body = row if isinstance(row, bytes) else json.dumps(row).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()


def answer(servers: BootstrapServers, where: str) -> Served:
    """What a server answers first. Raises the error if that is one."""
    servers.ask(where)
    until = time.monotonic() + 60
    while (found := dict(servers.answers()).get(where)) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    if isinstance(found, PeerUnreachable):
        raise found
    return found


def row(host: str, port: object) -> dict[str, object]:
    return {"rank_ip": host, "rank_port": port}


def test_a_step_does_not_wait_for_a_server_that_does_not_answer() -> None:
    servers, may_answer = BootstrapServers(), threading.Event()
    with (
        server({"-1": INSTANCE, "0": row("::1", 5), "1": row("[::1]", 5)}) as other,
        server({"-1": INSTANCE, "0": row("a", 5), "1": row("b", 6)}, may_answer=may_answer) as slow,
    ):
        for _ in range(5):
            servers.ask(slow)
        assert list(servers.answers()) == []
        groups = answer(servers, other).prefills  # it does not wait for the other one
        assert groups == {0: Prefill("[::1]:5", "tcp://[::1]:5", 0), 1: Prefill("[::1]:5", "tcp://[::1]:5", 1)}
        may_answer.set()
        instances = answer(servers, slow).prefills
        assert instances == {0: Prefill("a:5", "tcp://a:5", 0), 1: Prefill("b:6", "tcp://b:6", 0)}


def test_an_answer_that_is_forgotten() -> None:
    """It names the instance that was there when it was asked for, which another may have replaced."""
    may_answer, rows = threading.Event(), dict[str, object]({"-1": INSTANCE | {"dp_size": 1}, "0": row("127.0.0.1", 7000)})
    with server(rows, may_answer=may_answer) as where:
        servers = BootstrapServers()
        servers.ask(where)
        servers.forget_answers()  # of this one there is none yet
        may_answer.set()
        while not servers._asked[where].done():
            time.sleep(0.01)
        rows["0"] = row("127.0.0.1", 7001)
        servers.forget_answers()
        assert answer(servers, where).prefills[0].address == "tcp://127.0.0.1:7001"


@pytest.mark.parametrize(
    "rows",
    [
        {"-1": b"no JSON"},
        {"-1": []},
        {"-1": {"dp_size": 1}},
        {"-1": b"[" * MAX_NBYTES * 2},
        {"-1": INSTANCE, "0": {}},
        {"-1": INSTANCE, "0": row("a/b", 5)},
        {"-1": INSTANCE, "0": row("a", 1 << 16)},
        {"-1": INSTANCE, "0": {"rank_ip": 5, "rank_port": 5}},
    ],
)
def test_an_answer_that_names_no_instance(rows: dict[str, object]) -> None:
    with server(rows) as where, pytest.raises(PeerUnreachable, match=f"bootstrap server {where} does not name"):
        answer(BootstrapServers(), where)


@pytest.mark.parametrize("where", ["127.0.0.1:1", "a b:5", "[::1", "x" * 300, "http://[", "é:5", "127.0.0.1:99999"])
def test_a_server_that_cannot_be_asked(where: str) -> None:
    with pytest.raises(PeerUnreachable, match="does not name a prefill instance"):
        answer(BootstrapServers(), where)


def test_another_server_is_named_with_its_address() -> None:
    assert named("127.0.0.1:8998") is None
    assert named("x-0@::1:7000") == named("x-0@[::1]:7000") == Prefill("x-0", "tcp://[::1]:7000", 0)
