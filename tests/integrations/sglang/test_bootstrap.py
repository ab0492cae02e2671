"""Bootstrap servers, of which some do not answer, or answer with anything."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.plugins.hook_registry import HookRegistry

from disagg import PeerUnreachable
from disagg.integrations.sglang import bootstrap, plugin
from disagg.integrations.sglang.bootstrap import MAX_NBYTES, NO_RANK, BootstrapServers, Prefill, Served, named
from disagg.integrations.sglang.sender import DisaggKVSender

INSTANCE = {
    "attn_tp_size": 1,
    "attn_cp_size": 1,
    "dp_size": 2,
    "pp_size": 1,
    "page_size": 16,
    "kv_cache_dtype": "auto",
    "follow_bootstrap_room": True,
}


Asked = list[tuple[object, list[int]]]
"""The connection of each question for the ranks of rooms, and the rooms."""


@contextmanager
def server(
    rows: dict[str, object],
    *,
    may_answer: threading.Event | None = None,
    asked: Asked | None = None,
    answers_once: bool = False,
    port: int = 0,
) -> Iterator[str]:
    """Answers with what `rows` has for a data-parallel rank, once it may. `answers_once`: it keeps a connection after its first
    answer, and closes it at the next question.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        has_answered = False

        def do_GET(self) -> None:
            if may_answer is not None:
                may_answer.wait(60)
            self.answer(rows[parse_qs(urlsplit(self.path).query)["prefill_dp_rank"][0]])

        def do_POST(self) -> None:
            posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/register_dp_rank":
                rows["told"] = posted
            elif asked is not None:
                asked.append((self.client_address, posted["bootstrap_rooms"]))
            if answers_once and self.has_answered:
                self.close_connection = True
            else:
                self.answer(rows["rooms"])

        def answer(self, row: object) -> None:
            self.has_answered = True
            body = row if isinstance(row, bytes) else json.dumps(row).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
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
        {"-1": INSTANCE | {"dp_size": 0}},
        {"-1": INSTANCE | {"dp_size": 1025}, **{str(rank): {"rank_ip": "a", "rank_port": 5} for rank in range(1025)}},
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


@contextmanager
def dripping(num: int) -> Iterator[list[str]]:
    """Servers that answer with one byte at a time."""
    has_ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        with suppress(OSError), closing(listener.accept()[0]) as connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not has_ended.wait(0.05):
                connection.sendall(b"x")

    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        for listener in listeners:
            threading.Thread(target=drip, args=(listener,), daemon=True).start()
        try:
            yield [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        finally:
            has_ended.set()


def test_a_lookup_ends_in_time_however_slowly_its_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 0.5)
    with dripping(1) as (where,), pytest.raises(PeerUnreachable, match=f"{where} does not name.*no answer within"):
        answer(BootstrapServers(), where)


def test_slow_servers_do_not_hold_up_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 300.0)
    rows: dict[str, object] = {"-1": INSTANCE | {"dp_size": 1}, "0": row("a", 5), "rooms": {"7": 0}}
    with dripping(16) as slow, server(rows) as good, closing(BootstrapServers()) as servers:
        for where in slow:
            servers.ask(where)
        servers.ask(good, is_known=True)
        while not (found := dict(servers.answers())):
            time.sleep(0.01)
        assert list(found) == [good]
        assert ranks(servers, good, [7]) == {"7": 0}
        assert list(servers.answers()) == []


def test_only_so_many_unknown_servers_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(bootstrap, "MAX_ASKED", 2)
    with dripping(3) as (*slow, other), server({"-1": INSTANCE | {"dp_size": 1}, "0": row("a", 5)}) as known:
        servers = BootstrapServers()
        for where in (*slow, other):
            servers.ask(where)
        servers.ask(known, is_known=True)
        assert set(servers._asked) == {*slow, known}
        while not all(found.done() for found in servers._asked.values()):
            time.sleep(0.01)
        servers.ask(other)  # answers that nobody has come for make room
        assert set(servers._asked) == {other}


def ranks(servers: BootstrapServers, where: str, rooms: list[int]) -> dict[str, int]:
    """The ranks of rooms, as SGLang's scheduler asks for them."""
    plugin.register()
    HookRegistry.apply_hooks()
    BootstrapServers.current = servers
    until = time.monotonic() + 60
    try:
        while not (found := CommonKVReceiver.query_prefill_dp_ranks(where, rooms)):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        BootstrapServers.current = None
    return dict(found)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"7": 3}, {"7": 3}),  # of room 8 prefill has not heard yet
        ({"7": 3, "8": 1, "9": 0}, {"7": 3, "8": 1}),
        ([], {"7": -1, "8": -1}),
        (b"no JSON", {"7": -1, "8": -1}),
        ({"7": "x"}, {"7": -1, "8": -1}),
        ({"7": 1.5}, {"7": -1, "8": -1}),
        ({"7": None}, {"7": -1, "8": -1}),
        ({"7": {}}, {"7": -1, "8": -1}),
        ({"7": 1 << 70}, {"7": -1, "8": -1}),
    ],
)
def test_ranks_of_rooms(told: object, expected: dict[str, int]) -> None:
    with server({"rooms": told}) as where, closing(BootstrapServers()) as servers:
        assert ranks(servers, where, [7, 8]) == expected


def test_a_slow_answer_for_rooms_holds_up_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 300.0)
    servers = BootstrapServers()
    with dripping(1) as (where,):
        for _ in range(100):
            assert servers.room_ranks(where, [7]) == {}
        assert not servers._asked_ranks[where].done()


def rank_of(servers: BootstrapServers, where: str, *rooms: int) -> dict[str, int]:
    """What a server says to a question, or nothing if it is not asked."""
    found = servers.room_ranks(where, rooms)
    while where in servers._asked_ranks:
        found = servers.room_ranks(where, rooms)
    return found


def test_a_server_is_not_asked_for_the_same_rooms_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill may not have taken them in yet, or may never get them. A new room does not wait for them."""
    steps = itertools.count()
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: next(steps) * 1e-3))
    rows: dict[str, object] = {"rooms": {}}
    asked = Asked()
    with server(rows, asked=asked) as where, closing(BootstrapServers()) as servers:
        while next(steps) < 1000:
            assert rank_of(servers, where, 7) == {}
        assert 3 <= len(asked) <= 8
        before = len(asked)
        rows["rooms"] = {"8": 1}
        assert rank_of(servers, where, 7, 8) == {"8": 1}
        assert rank_of(servers, where, 7) == {}  # another one may be known now
        assert [rooms for _, rooms in asked[before:]] == [[7, 8], [7]]
        assert len({connection for connection, _ in asked}) == 1


def test_a_room_that_prefill_never_hears_of_gets_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time for which decode waits for prefill."""
    steps = itertools.count()
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: next(steps) * 1e-3))
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "2")
    with server({"rooms": {}}) as where, closing(BootstrapServers()) as servers:
        while (begun := next(steps)) < 1000:
            assert servers.room_ranks(where, [7]) == {}
        while not (found := servers.room_ranks(where, [7, 8])):
            pass
        assert found == {"7": NO_RANK}
        assert begun + 500 < next(steps) < begun + 1500
        assert servers.room_ranks(where, [8]) == {}
        while next(steps) < 30_000:
            pass
        assert servers.room_ranks(where, [8]) == {}, "of another request"


def test_rooms_do_not_fail_because_a_server_stood_still_for_a_question() -> None:
    rows: dict[str, object] = {"rooms": b"no JSON"}
    with server(rows) as where, closing(BootstrapServers()) as servers:
        question = servers._questions.get
        while (asked := question(where)) is None or asked.misses < 2:
            assert rank_of(servers, where, 7) == {}
        rows["rooms"] = {"7": 3}
        assert ranks(servers, where, [7, 8]) == {"7": 3}
        rows["rooms"] = b"no JSON"
        assert rank_of(servers, where, 8) == {}


def test_a_scheduler_that_stood_still_while_it_waited_soon_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "wait", lambda *_: time.sleep(0.5))
    with server({"rooms": {"7": 3}}) as where, closing(BootstrapServers()) as servers:
        servers.room_ranks(where, [7])
        assert servers._wait_at <= time.monotonic() + 0.5


def test_a_kept_connection_that_the_server_has_closed() -> None:
    asked = Asked()
    with server({"rooms": {"7": 3, "8": 1}}, asked=asked, answers_once=True) as where, closing(BootstrapServers()) as servers:
        assert rank_of(servers, where, 7) == {"7": 3}
        assert rank_of(servers, where, 8) == {"8": 1}
    assert [rooms for _, rooms in asked] == [[7], [8], [8]]


def tell(servers: BootstrapServers, where: str) -> None:
    """Room 7 is of data-parallel rank 3, as SGLang's sender says while its scheduler creates it."""
    sender = object.__new__(DisaggKVSender)
    sender.kv_mgr = SimpleNamespace(bootstrap=servers, attn_dp_rank=3)
    sender.bootstrap_server_url, sender.bootstrap_room = where, 7
    sender._register_prefill_dp_rank()


@pytest.mark.parametrize(("url", "server"), [("h:1", "h:1"), ("::1:8998", "[::1]:8998"), ("[::1]:8998", "[::1]:8998")])
def test_the_server_that_is_told_a_rank_may_have_an_ipv6_address(url: str, server: str) -> None:
    told: list[tuple[object, ...]] = []
    servers: Any = SimpleNamespace(tell_rank=lambda *given: told.append(given))
    tell(servers, url)
    assert told == [(server, 7, 3)]


def test_a_server_that_is_told_a_rank_holds_up_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 300.0)
    rows: dict[str, object] = {"rooms": {}}
    servers = BootstrapServers()
    with dripping(16) as slow, server(rows) as good:
        for where in (*slow, good):
            tell(servers, where)
        while "told" not in rows or len(servers._told) > len(slow):
            time.sleep(0.01)
        assert rows["told"] == {"bootstrap_room": 7, "dp_rank": 3}
        assert len(servers._told) == len(slow)


def test_a_server_that_starts_again_is_told_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TELL_AGAIN_S", (0.01,) * 1000)
    rows: dict[str, object] = {"rooms": {}}
    servers = BootstrapServers()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    tell(servers, f"127.0.0.1:{port}")
    time.sleep(0.2)
    assert servers._told
    with server(rows, port=port):
        while servers._told:
            time.sleep(0.01)
    assert rows["told"] == {"bootstrap_room": 7, "dp_rank": 3}


def test_only_so_many_ranks_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(bootstrap, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(bootstrap, "TELL_AGAIN_S", ())
    monkeypatch.setattr(bootstrap, "MAX_TOLD", 2)
    rows: dict[str, object] = {"rooms": {}}
    servers = BootstrapServers()
    with dripping(2) as slow, server(rows) as good:
        for where in (*slow, good):
            tell(servers, where)
        while servers._told:
            time.sleep(0.01)
        assert "told" not in rows
        for where, problem in ((good, "is not told the rank of room 7"), *((each, "no answer within") for each in slow)):
            assert any(where in message and problem in message for message in caplog.messages)
        tell(servers, good)
        while "told" not in rows:
            time.sleep(0.01)
