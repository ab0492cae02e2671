"""Channels: messages in order, connections that end, and limits."""

from __future__ import annotations

import contextlib
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from unittest.mock import ANY

import pytest
import zmq

from disagg.core.errors import ConfigError, PeerUnreachable
from disagg.machine.tcp import LONGEST_WAIT_S, sockets_of
from disagg.protocol.messages import MAX_MESSAGE_NBYTES
from disagg.runtime import channel as channels_of
from disagg.runtime import endless
from disagg.runtime.channel import MAX_FRAMES, Channel, _batches
from disagg.runtime.endless import MAX_UNKNOWN_NBYTES
from disagg.runtime.keys import KeyPair
from disagg.runtime.monitor import _is_later
from disagg.runtime.wire import Arrival, Closed, Inbound, Late, Reply
from tests.support.tcp import longest_waits_ms

DIAL = 3
"""The number of the client's connection."""


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    server, client = Channel("tcp://127.0.0.1:0"), Channel("tcp://127.0.0.1:0")
    client.connect(DIAL, server.address)
    yield server, client
    client.close()
    server.close()


def until(channel: Channel, count: int) -> list[Arrival]:
    """Poll until a channel has received `count` messages."""
    received: list[Arrival] = []
    for _ in range(200):
        received += channel.poll(0.1)
        if len(received) >= count:
            break
    return received


def exchange(server: Channel, client: Channel) -> bytes:
    """Exchange a message each way; return the server's connection."""
    client.send(DIAL, b"hello")
    client.flush()
    (hello,) = until(server, 1)
    assert isinstance(hello, Inbound)
    server.reply(hello.connection, b"welcome")
    assert until(client, 1) == [Reply(DIAL, b"welcome")]
    return hello.connection


def delivered(server: Channel, client: Channel, message: bytes) -> list[bytes]:
    """Send one message and return what the server receives."""
    client.send(DIAL, message)
    client.flush()
    return [found.data for found in until(server, 1) if isinstance(found, Inbound)]


def test_messages_on_one_connection_are_batched_and_arrive_in_order(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    messages = [str(number).encode() for number in range(200)]
    for message in messages:
        client.send(DIAL, message)
    client.flush()
    assert [found.data for found in until(server, 200) if isinstance(found, Inbound)] == messages


def test_a_message_ends_a_poll(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    exchange(server, client)
    client.send(DIAL, b"second")
    client.flush()
    assert len(list(server.poll(30.0))) == 1


def test_nothing_is_sent_on_a_connection_that_was_closed(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connection = exchange(server, client)
    client.disconnect(DIAL)
    assert not client.send(DIAL, b"lost")
    assert until(server, 1) == [Closed(connection)]


def test_what_arrived_before_the_end_of_a_connection_is_read_before_it() -> None:
    """Also if both are there at the next poll: the last message of a connection may be a goodbye."""
    with contextlib.closing(Channel("tcp://127.0.0.1:0")) as server:
        client = Channel("tcp://127.0.0.1:0")
        client.connect(DIAL, server.address)
        connection = exchange(server, client)
        client.send(DIAL, b"goodbye")
        client.close()
        assert select.select([server._monitor_descriptor], [], [], 30.0)[0]
        assert list(server.poll(30.0)) == [Inbound(connection, "", b"goodbye"), Closed(connection)]


def killed_client(address: str, code: str) -> subprocess.Popen[str]:
    """A process with a DEALER that has said hello."""
    script = f"import zmq, time; d = zmq.Context().socket(zmq.DEALER); d.connect({address!r}); d.send(b'hello'); {code}"
    return subprocess.Popen([sys.executable, "-c", script], text=True)


TWO_CLIENTS = """
import sys, time, zmq
context = zmq.Context()
def client(message):
    dealer = context.socket(zmq.DEALER)
    dealer.connect(sys.argv[1])
    dealer.send(message)
    time.sleep(0.3)
    return dealer
first = client(b"first")
if more := input():
    first.send(more.encode())
client(b"earlier").close()
time.sleep(0.3)
later = client(b"later")
print("sent", flush=True)
input()
later.send(b"again")
input()
"""


@contextlib.contextmanager
def two_clients_of_one_descriptor(server: Channel, *, in_order: bool) -> Iterator[tuple[Iterator[Arrival], IO[str]]]:
    """What arrives while the first message is dealt with: those of two clients, of which the first has ended. A ROUTER takes
    turns among connections: without `in_order` it hands out the later one's message first.
    """
    command = [sys.executable, "-c", TWO_CLIENTS, server.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdin is not None
        assert clients.stdout is not None
        arrivals = (each for _ in range(600) for each in server.poll(0.1))
        assert next(arrivals) == Inbound(ANY, "", b"first")
        print("more" if in_order else "", file=clients.stdin, flush=True)
        assert clients.stdout.readline() == "sent\n"
        if in_order:
            assert next(arrivals) == Inbound(ANY, "", b"more")
        yield arrivals, clients.stdin
        print(file=clients.stdin, flush=True)


def test_a_connection_outlives_an_earlier_one_of_its_descriptor_whose_message_is_read_late() -> None:
    with (
        contextlib.closing(Channel("tcp://127.0.0.1:0")) as server,
        two_clients_of_one_descriptor(server, in_order=False) as (arrivals, clients),
    ):
        later = next(arrivals)
        assert isinstance(later, Inbound)
        assert later.data == b"later"
        assert next(arrivals) == Late("", b"earlier")
        print(file=clients, flush=True)
        assert next(arrivals) == Inbound(later.connection, "", b"again")


def test_a_connection_ends_though_a_later_one_of_its_descriptor_is_there() -> None:
    """Nothing but that one's message tells."""
    with (
        contextlib.closing(Channel("tcp://127.0.0.1:0")) as server,
        two_clients_of_one_descriptor(server, in_order=True) as (arrivals, clients),
    ):
        earlier, later = next(arrivals), next(arrivals)
        assert isinstance(earlier, Inbound)
        assert isinstance(later, Inbound)
        assert (earlier.data, later.data) == (b"earlier", b"later")
        assert next(arrivals) == Closed(earlier.connection)
        print(file=clients, flush=True)
        assert next(arrivals) == Inbound(later.connection, "", b"again")


def test_connections_are_in_the_order_of_their_ids() -> None:
    def counted(number: int) -> bytes:
        return b"\0" + (number % (1 << 32)).to_bytes(4, "big")

    for first in (0, 7, (1 << 32) - 1):  # libzmq begins with a random number
        assert _is_later(counted(first + 1), counted(first))
        assert not _is_later(counted(first), counted(first + 1))
    chosen = b"\1mine"
    assert _is_later(counted(7), chosen)
    assert _is_later(counted(7), b"mine")
    assert not _is_later(chosen, counted(7))
    assert not _is_later(chosen, b"mine")


def test_the_end_of_a_peers_process_ends_its_connection() -> None:
    with contextlib.closing(Channel("tcp://127.0.0.1:0")) as server:
        client = killed_client(server.address, "time.sleep(600)")
        (hello,) = until(server, 1)
        assert isinstance(hello, Inbound)
        client.kill()
        client.wait()
        assert until(server, 1) == [Closed(hello.connection)]


def test_a_stopped_process_is_given_up_and_a_busy_interpreter_is_not() -> None:
    """Libzmq's own threads answer pings, so a thread that holds the interpreter costs no connection."""
    with contextlib.closing(Channel("tcp://127.0.0.1:0", heartbeat_s=0.2, heartbeat_timeout_s=2.5)) as server:
        spin = "import ctypes; ctypes.PyDLL(None).usleep(5_000_000); d.send(b'after'); time.sleep(600)"  # holds the interpreter
        client = killed_client(server.address, spin)
        try:
            hello, after = until(server, 2)
            assert isinstance(hello, Inbound)
            assert after == Inbound(hello.connection, "", b"after")
            client.send_signal(signal.SIGSTOP)
            assert until(server, 1) == [Closed(hello.connection)]
        finally:
            client.kill()
            client.wait()


def test_a_descriptor_that_is_used_again_is_another_connection() -> None:
    with contextlib.closing(Channel("tcp://127.0.0.1:0")) as server:
        seen = []
        for _ in range(5):
            client = killed_client(server.address, "time.sleep(600)")
            (hello,) = until(server, 1)
            client.kill()
            client.wait()
            assert isinstance(hello, Inbound)
            assert until(server, 1) == [Closed(hello.connection)]
            seen.append(hello.connection)
        assert len(set(seen)) == len(seen)


def test_an_address_that_cannot_be_dialled_is_an_error_of_that_connection(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    for address in ("tcp://a b:1", "tcp://bücher.example:5555", "nonsense"):
        with pytest.raises(ConfigError, match="peer address"):
            client.connect(4, address)
    with (
        contextlib.closing(Channel("tcp://127.0.0.1:0", keys=KeyPair.generate())) as with_keys,
        pytest.raises(ConfigError, match="public key is needed"),
    ):
        with_keys.connect(1, server.address)
    assert not client.send(4, b"lost")
    assert delivered(server, client, b"still received") == [b"still received"]


def test_more_sockets_can_be_open_than_libzmq_allows_by_itself() -> None:
    """1,023 by default. Descriptors are the limit then, and running out of them ends nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with contextlib.closing(Channel("tcp://127.0.0.1:0")) as channel:
            for dial in range(1100):
                channel.connect(dial, "tcp://127.0.0.1:9")
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
            with pytest.raises(PeerUnreachable, match="Too many open files"):
                channel.connect(2000, "tcp://127.0.0.1:9")
            for dial in range(1100):
                channel.disconnect(dial)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
            channel.connect(2001, "tcp://127.0.0.1:9")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_retransmit_soon_at_both_ends() -> None:
    """Also once libzmq has connected anew."""
    before = sockets_of("self")
    server, client = Channel("tcp://127.0.0.1:0"), Channel("tcp://127.0.0.1:0")
    client.connect(DIAL, server.address)
    try:
        exchange(server, client)
        assert longest_waits_ms(since=before) == [LONGEST_WAIT_S * 1000] * 2
    finally:
        client.close()
        server.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE_LARGE = 3
"""The flags of a long frame that others follow."""


def sent_until_it_is_ended(hostile: socket.socket, server: Channel, frame: bytes) -> int:
    """How many frames of one message a server has let come, of 2,000 at most."""
    hostile.settimeout(5.0)  # it may be left with a closed window
    hostile.sendall(GREETING + READY)
    for number in range(2_000):
        try:
            hostile.sendall(frame)
        except OSError:
            return number
        list(server.poll(0.0))
    return 2_000


def test_a_hello_of_a_connection_that_has_ended_is_late() -> None:
    """The server was busy meanwhile."""
    server, client = Channel("tcp://127.0.0.1:0"), Channel("tcp://127.0.0.1:0")
    client.connect(DIAL, server.address)
    client.send(DIAL, b"hello")
    client.send(DIAL, b"goodbye")
    client.close()
    port = int(server.address.rpartition(":")[2])
    until_s = time.monotonic() + 30
    while any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] in OPEN for line in kernels_sockets()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert until(server, 1)[0] == Late("", b"hello")
    server.close()


OPEN = ("01", "08")
"""Established, and closed by the other side only, as the kernel writes it."""


def kernels_sockets() -> list[str]:
    return Path("/proc/net/tcp").read_text().splitlines()[1:]


def test_a_connection_whose_message_does_not_end_is_ended(
    channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are not. libzmq bounds a frame, not the number of frames of a message."""
    monkeypatch.setattr(endless, "MAX_UNKNOWN_NBYTES", 1 << 20)
    monkeypatch.setattr(endless, "CHECK_S", 0.0)
    server, client = channels
    exchange(server, client)
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    frame = bytes([MORE_LARGE]) + (1 << 16).to_bytes(8, "big") + bytes(1 << 16)
    with socket.create_connection((host, int(port))) as hostile:
        assert sent_until_it_is_ended(hostile, server, frame) < 2_000
        for _ in range(600):
            list(server.poll(0.1))
            if len(server._monitor._open) == 1:  # the client's
                break
        else:
            pytest.fail("the connection is open")
    client.send(DIAL, bytes(1 << 21))
    client.send(DIAL, b"still here")
    client.flush()
    assert [len(each.data) for each in until(server, 2) if isinstance(each, Inbound)] == [1 << 21, 10]


def test_messages_that_do_not_end_are_bounded_for_all_connections_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest are ended. One whose rank is not known may send less than others."""
    received, shut = dict.fromkeys(range(6), 0), list[int]()
    monkeypatch.setattr(endless, "num_received", received.get)
    monkeypatch.setattr(endless, "MAX_ALL_NBYTES", 4 * MAX_UNKNOWN_NBYTES)
    messages = endless.EndlessMessages()
    monkeypatch.setattr(messages, "shut", lambda descriptor, *_: shut.append(descriptor))

    def ended() -> list[int]:
        messages._check_at = 0.0
        messages.end(received, 0, known={0, 1})
        found, shut[:] = shut[:], []
        return found

    assert ended() == []
    received |= {0: MAX_UNKNOWN_NBYTES + 1, 1: 1, 2: MAX_UNKNOWN_NBYTES + 1}
    assert ended() == [2]
    received |= {2: 0, 3: MAX_UNKNOWN_NBYTES, 4: MAX_UNKNOWN_NBYTES, 5: MAX_UNKNOWN_NBYTES}
    assert ended() == [0]
    for descriptor in received:
        messages.hear(descriptor)
    assert ended() == []


def test_a_process_that_stood_still_while_it_checked_connections_soon_checks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless, "num_received", lambda _: time.sleep(0.5))
    messages = endless.EndlessMessages()
    messages.end([0], 0, known=())
    assert messages._check_at <= time.monotonic() + 2.0


def test_a_connection_whose_message_has_too_many_frames_is_ended(channels: tuple[Channel, Channel]) -> None:
    """Each would be a message. Nothing of it is taken, and others are not ended."""
    server, client = channels
    exchange(server, client)
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        hostile.linger = 0
        hostile.setsockopt(zmq.RECONNECT_IVL, -1)
        hostile.connect(server.address)
        hostile.send_multipart([b""] * MAX_FRAMES)
        assert until(server, MAX_FRAMES) == [Inbound(ANY, "", b"")] * MAX_FRAMES
        hostile.send_multipart([b""] * 10_000)
        (ended,) = until(server, 1)
        assert isinstance(ended, Closed)
    assert delivered(server, client, b"still here") == [b"still here"]


def test_a_poll_takes_a_bounded_number_of_bytes(channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = channels
    exchange(server, client)
    monkeypatch.setattr(channels_of, "MAX_MESSAGE_NBYTES", 100)
    for _ in range(8):
        client.send(DIAL, bytes(60))
    client.flush()
    found: list[int] = []
    while sum(found) < 8:
        found.append(len(list(server.poll(1.0))))
    assert max(found) <= 2


FIRST_ID = """
import ctypes
ctypes.CDLL(None).srand(7)
from disagg.runtime.channel import Channel
server, client = Channel("tcp://127.0.0.1:0"), Channel("tcp://127.0.0.1:0")
client.connect(0, server.address)
client.send(0, b"hello")
client.flush()
while not (found := list(server.poll(1.0))):
    pass
print(found[0].connection.hex())
client.close()
server.close()
"""


def test_the_ids_of_connections_cannot_be_foreseen() -> None:
    """A connection that chooses the id which the next one gets ends the process."""
    runs = [subprocess.run([sys.executable, "-c", FIRST_ID], capture_output=True, text=True, check=True) for _ in range(2)]
    first, second = (run.stdout.strip() for run in runs)
    assert len(first) == len(second) == 10
    assert first != second


def test_messages_that_leave_together_are_few_and_short() -> None:
    long = bytes(MAX_MESSAGE_NBYTES)
    assert list(_batches([b"a", long, b"b"])) == [[b"a"], [long], [b"b"]]
    assert [len(batch) for batch in _batches([b"a"] * (MAX_FRAMES + 1))] == [MAX_FRAMES, 1]
    assert list(_batches([])) == []
