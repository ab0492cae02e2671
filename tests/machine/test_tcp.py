"""How soon TCP retransmits."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from disagg.machine import tcp
from disagg.machine.tcp import (
    LONGEST_WAIT_S,
    SILENCE_S,
    SLOW_S,
    EngineConnections,
    new_listeners,
    ports_of,
    retransmit_soon,
    sockets_of,
)
from tests.support.tcp import longest_wait_ms, longest_waits_ms


def test_new_listeners_what_they_accept_and_slow_connections_retransmit_soon() -> None:
    before = sockets_of("self")
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        with new_listeners() as found:
            server = socket.create_server(("127.0.0.1", 0))
        assert list(found) == [server.fileno()]
        assert longest_wait_ms(earlier) > LONGEST_WAIT_S * 1000
        with server, socket.create_connection(server.getsockname()) as client:
            accepted, _ = server.accept()
            with accepted:
                assert longest_wait_ms(accepted) == LONGEST_WAIT_S * 1000
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_S * 1000
                others, connections = EngineConnections(), EngineConnections()
                others.add([earlier.getsockname()[1]])
                others.retransmit_soon()
                connections.add(ports_of(found))
                connections.note_progress(time.monotonic())
                assert longest_wait_ms(client) > LONGEST_WAIT_S * 1000
                connections.note_progress(time.monotonic() - SLOW_S)
                assert longest_waits_ms(since=before) == [LONGEST_WAIT_S * 1000] * 2


def test_a_process_that_stood_still_while_it_looked_soon_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_still() -> tuple[()]:
        time.sleep(0.5)
        return ()

    monkeypatch.setattr(tcp, "tcp_sockets", stand_still)
    connections = EngineConnections()
    connections.retransmit_soon()
    assert connections._not_before <= time.monotonic() + 5.0


def test_other_descriptors_are_left_alone() -> None:
    left, right = socket.socketpair()
    with left, right, Path(os.devnull).open("rb") as file:
        held = {entry.name for entry in Path("/proc/self/fd").iterdir()}
        for descriptor in (left.fileno(), file.fileno(), 1 << 20, -1):
            retransmit_soon(descriptor)
        assert ports_of([file.fileno(), 1 << 20]) == ()
        assert {entry.name for entry in Path("/proc/self/fd").iterdir()} == held
