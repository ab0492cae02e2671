"""Channels: messages over local connections, and over TCP where there is none."""

from __future__ import annotations

import contextlib
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from disagg.core.errors import ConfigError, PeerUnreachable
from disagg.machine.tcp import LONGEST_WAIT_S, own_sockets
from disagg.protocol.messages import MAX_MESSAGE_NBYTES
from disagg.runtime import endless
from disagg.runtime.channel import MAX_FRAMES, Channel, _batches
from disagg.runtime.keys import KeyPair
from disagg.runtime.local_socket import (
    MAX_PACKET_NBYTES,
    MAX_UNAUTHENTICATED,
    Invitation,
    LocalConnection,
    Source,
)
from disagg.runtime.wire import Arrival, Closed, Inbound, Reply
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


def connect_locally(server: Channel, client: Channel) -> bytes:
    """Exchange a hello and a welcome with an invitation; return the server's connection."""
    client.send(DIAL, b"hello")
    client.flush()
    (hello,) = until(server, 1)
    assert isinstance(hello, Inbound)
    server.reply(hello.connection, b"welcome", offer_local=True)
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


def test_messages_on_a_local_connection_keep_their_source(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connection = connect_locally(server, client)
    long = bytes(MAX_PACKET_NBYTES)
    for message in (b"short", long, b"after"):
        client.send(DIAL, message)
    list(client.poll(0.0))
    found = until(server, 3)
    assert {(one.connection, one.data) for one in found if isinstance(one, Inbound)} == {
        (connection, b"short"), (connection, long), (connection, b"after")
    }  # fmt: skip
    assert client._peers[DIAL].local is not None
    assert server.reply(connection, b"again", offer_local=True)
    local = client._peers[DIAL].local
    assert until(client, 1) == [Reply(DIAL, b"again")]
    assert client._peers[DIAL].local is local


def test_a_message_on_a_local_connection_ends_a_poll(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connect_locally(server, client)
    assert delivered(server, client, b"first") == [b"first"]
    client.send(DIAL, b"second")
    client.flush()
    assert len(list(server.poll(30.0))) == 1


def test_after_a_local_connection_ends_messages_use_tcp(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connect_locally(server, client)
    assert delivered(server, client, b"by local socket") == [b"by local socket"]
    for descriptor in list(server._local._connections):
        server._close_local(descriptor)
    assert delivered(server, client, b"by tcp") == [b"by tcp"]
    assert client._peers[DIAL].local is None


def test_disconnect_closes_both_ends_of_the_local_connection(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connect_locally(server, client)
    assert delivered(server, client, b"by local socket") == [b"by local socket"]
    (descriptor,) = server._local._connections
    client.disconnect(DIAL)
    assert select.select([descriptor], [], [], 20)[0]
    list(server.poll(0.1))
    assert not server._local._connections
    assert not client.send(DIAL, b"lost")


def test_silent_unauthenticated_clients_are_bounded(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connection = connect_locally(server, client)
    name = msgspec.msgpack.decode(server._local.invite(Source(connection, "")), type=Invitation).name
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(MAX_UNAUTHENTICATED + 5)]
    for each in clients:
        each.connect(f"\0{name}")
        list(server.poll(0.1))
    assert len(server._local._unauthenticated) <= MAX_UNAUTHENTICATED
    assert delivered(server, client, b"still received") == [b"still received"]
    for each in clients:
        each.close()


def killed_client(address: str, code: str) -> subprocess.Popen[str]:
    """A process with a DEALER that has said hello."""
    script = f"import zmq, time; d = zmq.Context().socket(zmq.DEALER); d.connect({address!r}); d.send(b'hello'); {code}"
    return subprocess.Popen([sys.executable, "-c", script], text=True)


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


def test_a_local_connection_ends_with_its_tcp_connection_after_its_last_messages() -> None:
    """Otherwise messages would count for a connection that nobody can answer on."""
    server, client = Channel("tcp://127.0.0.1:0"), Channel("tcp://127.0.0.1:0")
    with contextlib.closing(server), contextlib.closing(client):
        client.connect(DIAL, server.address)
        connection = connect_locally(server, client)
        assert delivered(server, client, b"first") == [b"first"]
        (descriptor,) = server._local._connections
        client.send(DIAL, b"last")
        client.flush()
        peer = client._peers.pop(DIAL)
        client._poller.unregister(peer.socket)
        peer.socket.close(0)
        found = until(server, 2)
        client._leave(peer)
        assert [each for each in found if isinstance(each, Closed)] == [Closed(connection)]
        assert Inbound(connection, "", b"last") in found
        assert not server._local.holds(descriptor)


def test_an_invitation_ends_with_its_tcp_connection(channels: tuple[Channel, Channel]) -> None:
    """An answer that was on its way when the connection ended may bring it later: messages would count for that connection."""
    server, client = channels
    connection = connect_locally(server, client)
    invitation = server._local.invite(Source(connection, ""))
    client.disconnect(DIAL)
    while Closed(connection) not in server.poll(20.0):
        pass
    late = LocalConnection.open(invitation)
    assert late is not None
    late.send([b"late"])
    for _ in range(5):
        assert not [found for found in server.poll(0.1) if isinstance(found, Inbound)]
    assert not server._local.descriptors()
    late.close()


def test_connections_retransmit_soon_at_both_ends() -> None:
    """Also once libzmq has connected anew."""
    before = own_sockets()
    server, client = Channel("tcp://127.0.0.1:0"), Channel("tcp://127.0.0.1:0")
    client.connect(DIAL, server.address)
    try:
        connect_locally(server, client)
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


def test_a_connection_whose_message_does_not_end_is_ended(
    channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are not. libzmq bounds a frame, not the number of frames of a message."""
    monkeypatch.setattr(endless, "MAX_NBYTES", 1 << 20)
    monkeypatch.setattr(endless, "CHECK_S", 0.0)
    server, client = channels
    connect_locally(server, client)
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


def test_pings_are_no_part_of_a_message_that_does_not_end(
    channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of one host take the local connection, and pings TCP."""
    server, client = channels
    connect_locally(server, client)
    monkeypatch.setattr(endless, "CHECK_S", 0.0)
    heard: list[int] = []
    monkeypatch.setattr(endless.EndlessMessages, "hear", lambda _, descriptor: heard.append(descriptor))
    client.send(DIAL, b"by the local connection")
    client.flush()
    assert [each.data for each in until(server, 1) if isinstance(each, Inbound)] == [b"by the local connection"]
    assert heard


def test_messages_that_leave_together_are_few_and_short() -> None:
    long = bytes(MAX_MESSAGE_NBYTES)
    assert list(_batches([b"a", long, b"b"])) == [[b"a"], [long], [b"b"]]
    assert [len(batch) for batch in _batches([b"a"] * (MAX_FRAMES + 1))] == [MAX_FRAMES, 1]
    assert list(_batches([])) == []
