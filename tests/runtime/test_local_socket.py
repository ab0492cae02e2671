"""Local connections: invitations, accepted and refused clients, and delivered messages."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from disagg.core import _native
from disagg.core.errors import RemoteProtocolError
from disagg.runtime import completion_page, local_socket
from disagg.runtime.channel import Channel, Inbound, Reply
from disagg.runtime.completion_page import NUM_WORDS, CompletionPage, CompletionPageView
from disagg.runtime.local_socket import (
    MAX_PACKET_NBYTES,
    MAX_UNAUTHENTICATED,
    Invitation,
    LocalConnection,
    LocalListener,
    Source,
)

SOURCE = Source(b"connection", "key")


@pytest.fixture
def listener() -> Iterator[LocalListener]:
    new = LocalListener()
    yield new
    new.close()


@pytest.fixture
def opened(listener: LocalListener) -> Iterator[tuple[LocalConnection, int]]:
    connection = LocalConnection.open(listener.invite(SOURCE))
    assert connection is not None
    (descriptor,) = listener.accept()
    yield connection, descriptor
    connection.close()


def test_messages_arrive_in_order_with_their_source(listener: LocalListener, opened: tuple[LocalConnection, int]) -> None:
    connection, descriptor = opened
    messages = [b"", b"one", bytes(1000), *(str(number).encode() for number in range(500))]
    assert connection.send(messages) == len(messages)
    assert listener.take(descriptor) == (SOURCE, messages)
    assert listener.take(descriptor) == (SOURCE, [])


def test_an_invitation_is_the_same_for_the_life_of_its_connection(listener: LocalListener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert listener.invite(SOURCE) == listener.invite(SOURCE)
    assert listener.invite(SOURCE) != listener.invite(Source(b"another", "key"))
    monkeypatch.setattr(local_socket, "MAX_INVITATIONS", 1)
    first = listener.invite(SOURCE)
    listener.invite(Source(b"a third", "key"))
    assert listener.invite(SOURCE) != first  # the first invitation was revoked


def test_messages_beyond_one_packet_are_split_over_several(listener: LocalListener, opened: tuple[LocalConnection, int]) -> None:
    connection, descriptor = opened
    messages = [bytes([number]) * 30_000 for number in range(5)]
    assert connection.send(messages) == 5
    assert listener.take(descriptor) == (SOURCE, messages)


def test_send_returns_the_number_of_messages_that_fit(listener: LocalListener, opened: tuple[LocalConnection, int]) -> None:
    connection, descriptor = opened
    long = bytes(MAX_PACKET_NBYTES)
    assert connection.send([b"short", long, b"after"]) == 1
    assert connection.send([long]) == 0
    assert listener.take(descriptor) == (SOURCE, [b"short"])
    sent = 0
    while (queued := connection.send([bytes(30_000)])) == 1:  # until the queue is full, because the listener does not read
        sent += queued
    assert sent > 0
    _, found = listener.take(descriptor) or (None, [])
    assert len(found) == sent


def test_a_closed_connection_delivers_its_queued_messages_before_its_end(listener: LocalListener, opened: tuple[LocalConnection, int]) -> None:
    connection, descriptor = opened
    connection.send([b"last message"])
    connection.close()
    assert listener.take(descriptor) == (SOURCE, [b"last message"])
    assert listener.take(descriptor) is None
    listener.close_connection(descriptor)


def test_sending_to_a_connection_closed_by_the_peer_raises(
    listener: LocalListener, opened: tuple[LocalConnection, int]
) -> None:
    connection, descriptor = opened
    listener.take(descriptor)
    listener.close_connection(descriptor)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        connection.send([b"lost"])


@pytest.mark.parametrize(
    "invitation",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["name", b"token", 3]),
        msgspec.msgpack.encode([7, b"token"]),
        msgspec.msgpack.encode(["no listener has this name", b"token"]),
        msgspec.msgpack.encode(["x" * 200, b"token"]),
        msgspec.msgpack.encode(["zero\0byte", b"token"]),
    ],
)
def test_an_invalid_invitation_opens_no_connection(invitation: bytes) -> None:
    assert LocalConnection.open(invitation) is None


def raw_client(listener: LocalListener) -> tuple[socket.socket, int]:
    """A connected socket that has sent nothing, and the accepted descriptor."""
    name = msgspec.msgpack.decode(listener.invite(SOURCE), type=Invitation).name
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(f"\0{name}")
    (descriptor,) = listener.accept()
    return client, descriptor


@pytest.mark.parametrize("token", [b"", b"guess", bytes(16), bytes(17)])
def test_a_client_without_the_token_is_closed(listener: LocalListener, token: bytes) -> None:
    client, descriptor = raw_client(listener)
    with client:
        client.send(token)
        assert listener.take(descriptor) is None
        listener.close_connection(descriptor)
        assert client.recv(1) == b""


def test_clients_that_send_nothing_or_close_are_closed(listener: LocalListener) -> None:
    client, descriptor = raw_client(listener)
    assert listener.take(descriptor) is None  # nothing was messages, so there was nothing to look for
    client.close()
    assert listener.take(descriptor) is None
    silent = [raw_client(listener) for _ in range(MAX_UNAUTHENTICATED)]
    assert listener.excess() == [descriptor]
    listener.close_connection(descriptor)
    assert listener.excess() == []
    for client, _ in silent:
        client.close()


def test_a_client_of_another_user_is_closed(listener: LocalListener, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = LocalConnection.open(listener.invite(SOURCE))
    assert connection is not None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert list(listener.accept()) == []
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        connection.send([b"hello"])
    connection.close()


@pytest.mark.parametrize("packet", [b"\x01", struct.pack("<I", 5) + b"four", struct.pack("<I", 1) + b"ab\x00\x00"])
def test_an_invalid_packet_ends_the_connection(listener: LocalListener, packet: bytes) -> None:
    invitation = msgspec.msgpack.decode(listener.invite(SOURCE), type=Invitation)
    client, descriptor = raw_client(listener)
    with client:
        client.send(invitation.token)
        assert listener.take(descriptor) == (SOURCE, [])
        client.send(packet)
        taken = listener.take(descriptor)
        assert taken is None or taken == (SOURCE, [b"a"])


# -- completion pages ----------------------------------------------------------------------------------------------------------------


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def accepts_page(listener: LocalListener, descriptor: int) -> bool:
    """Whether the listener accepts a client that sends `descriptor` with its token."""
    invitation = msgspec.msgpack.decode(listener.invite(SOURCE), type=Invitation)
    client, accepted = raw_client(listener)
    with client:
        socket.send_fds(client, [invitation.token], [descriptor])
        taken = listener.take(accepted)
        assert taken in (None, (SOURCE, []))
        return taken is not None


@pytest.fixture
def page() -> Iterator[CompletionPage]:
    new = CompletionPage.make()
    assert new is not None
    yield new
    new.close()


@pytest.fixture
def polling_listener() -> Iterator[LocalListener]:
    new = LocalListener(polls=True)
    yield new
    new.close()


def test_a_completion_word_is_set_once_its_flag_is_set(polling_listener: LocalListener, page: CompletionPage) -> None:
    flag = _native.Flag()
    connection = LocalConnection.open(polling_listener.invite(SOURCE), page)
    assert connection is not None
    assert connection.polled
    (descriptor,) = polling_listener.accept()
    assert polling_listener.take(descriptor) == (SOURCE, [])
    view = polling_listener.page_of(SOURCE)
    assert view is not None
    connection.close()
    assert polling_listener.take(descriptor) is None
    polling_listener.close_connection(descriptor)
    assert polling_listener.page_of(SOURCE) is None  # existing views stay valid
    signals = [page.signal(flag) for _ in range(NUM_WORDS + 1)]
    words = [view.word(*place) for _, place in signals]
    assert len({value for _, (_, value) in signals}) == len(signals)
    signal, word = signals[0][0], words[0]
    assert not _native.busy_poll(0.0, completions=[signal, word])
    assert not word.is_set()
    flag.set()
    assert _native.busy_poll(0.0, completions=[signal])
    assert [each.is_set() for each in words] == [True] + [False] * NUM_WORDS
    signals[-1][0].signal()  # the same word with another value
    assert [each.is_set() for each in words] == [False] * NUM_WORDS + [True]
    assert _native.busy_poll(10.0, completions=[words[-1]])


def test_a_listener_without_polling_takes_no_completion_page(listener: LocalListener, page: CompletionPage) -> None:
    assert len(msgspec.msgpack.decode(listener.invite(SOURCE))) == 2
    connection = LocalConnection.open(listener.invite(SOURCE), page)
    assert connection is not None
    assert not connection.polled
    connection.close()
    assert len(list(listener.accept())) == 1
    assert accepts_page(listener, page.fileno())  # the client sends a page without being asked
    assert listener.page_of(SOURCE) is None


def test_a_peer_cannot_write_to_a_shared_completion_page(page: CompletionPage) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(page.fileno(), 4096)
    with pytest.raises(PermissionError):
        os.pwrite(page.fileno(), b"1", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(page.fileno(), 0)
    view = CompletionPageView.of(page.fileno())
    assert view is not None
    signal, place = page.signal(_native.Flag())
    with pytest.raises(TypeError):
        _native.CompletionSignal(_native.Flag(), view._words, *place)
    assert not view.word(*place).is_set()
    signal.signal()
    assert view.word(*place).is_set()


def test_a_completion_page_is_sent_only_to_processes_of_this_user(
    polling_listener: LocalListener, page: CompletionPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    invitation = polling_listener.invite(SOURCE)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert LocalConnection.open(invitation, page) is None


def test_no_completion_page_is_made_on_a_system_without_write_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_descriptors()
    monkeypatch.setattr(completion_page, "_F_SEAL_FUTURE_WRITE", 1 << 30)
    assert CompletionPage.make() is None
    assert num_descriptors() == before
    with contextlib.closing(Channel("tcp://127.0.0.1:0", polls=True)) as channel:
        assert channel.completion_page("tcp://127.0.0.1:1") is None


def test_each_connection_has_its_own_completion_page(polling_listener: LocalListener, page: CompletionPage) -> None:
    connections, descriptors = [], []
    for _ in range(2):
        connection = LocalConnection.open(polling_listener.invite(SOURCE), page)
        assert connection is not None
        (descriptor,) = polling_listener.accept()
        assert polling_listener.take(descriptor) == (SOURCE, [])
        connections.append(connection)
        descriptors.append(descriptor)
    polling_listener.close_connection(descriptors[0])
    assert polling_listener.page_of(SOURCE) is not None
    polling_listener.close_connection(descriptors[1])
    assert polling_listener.page_of(SOURCE) is None
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("kind", ["pipe", "small", "large", "not sealed", "empty"])
def test_an_invalid_completion_page_is_refused(polling_listener: LocalListener, kind: str) -> None:
    if kind == "pipe":
        descriptor, other = os.pipe()
        os.close(other)
    else:
        descriptor = os.memfd_create("invalid page", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, {"small": 8, "large": 2 << 20, "not sealed": 4096, "empty": 0}[kind])
        if kind != "not sealed":
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    before = num_descriptors()
    assert not accepts_page(polling_listener, descriptor)
    assert polling_listener.page_of(SOURCE) is None
    assert num_descriptors() == before + 1  # the descriptor of the accepted connection
    os.close(descriptor)


@pytest.mark.parametrize("index", [NUM_WORDS, 2**31 - 1])
def test_a_word_outside_a_completion_page_is_refused(index: int) -> None:
    view = CompletionPageView(np.zeros(NUM_WORDS, np.uint64))
    with pytest.raises(RemoteProtocolError, match=f"expected a word below {NUM_WORDS}, found {index}"):
        view.word(index, 1)


# -- in a channel ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    server, client = Channel("tcp://127.0.0.1:0"), Channel("tcp://127.0.0.1:0")
    client.connect(server.address)
    yield server, client
    client.close()
    server.close()


def until(channel: Channel, count: int) -> list[Inbound | Reply]:
    found: list[Inbound | Reply] = []
    for _ in range(200):
        found += channel.poll(0.1)
        if len(found) >= count:
            break
    return found


def connect_locally(server: Channel, client: Channel) -> bytes:
    """Exchange a hello and a welcome with an invitation; return the server's connection."""
    client.send(server.address, b"hello")
    client.flush()
    (hello,) = until(server, 1)
    assert isinstance(hello, Inbound)
    server.reply(hello.connection, b"welcome", offer_local=True)
    assert until(client, 1) == [Reply(server.address, b"welcome")]
    return hello.connection


def delivered(server: Channel, client: Channel, messages: bytes) -> list[bytes]:
    """Send one message and return what the server receives."""
    client.send(server.address, messages)
    client.flush()
    return [found.data for found in until(server, 1)]


def test_messages_to_one_address_are_batched_and_arrive_in_order(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    messages = [str(number).encode() for number in range(200)]
    for message in messages:
        client.send(server.address, message)
    client.flush()
    assert [found.data for found in until(server, 200)] == messages


def test_messages_on_a_local_connection_keep_their_source(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connection = connect_locally(server, client)
    long = bytes(MAX_PACKET_NBYTES)
    for message in (b"short", long, b"after"):
        client.send(server.address, message)
    list(client.poll(0.0))
    found = until(server, 3)
    assert {(one.connection, one.data) for one in found if isinstance(one, Inbound)} == {
        (connection, b"short"), (connection, long), (connection, b"after")
    }  # fmt: skip
    assert client._peers[server.address].local is not None
    assert server.reply(connection, b"again", offer_local=True)
    local = client._peers[server.address].local
    assert until(client, 1) == [Reply(server.address, b"again")]
    assert client._peers[server.address].local is local


def test_a_message_on_a_local_connection_ends_a_poll(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connect_locally(server, client)
    assert delivered(server, client, b"first") == [b"first"]
    client.send(server.address, b"second")
    client.flush()
    assert len(list(server.poll(30.0))) == 1


def test_after_a_local_connection_ends_messages_use_tcp(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connect_locally(server, client)
    assert delivered(server, client, b"by local socket") == [b"by local socket"]
    for descriptor in list(server._local._connections):
        server._close_local(descriptor)
    assert delivered(server, client, b"by tcp") == [b"by tcp"]
    assert client._peers[server.address].local is None


def test_disconnect_closes_both_ends_of_the_local_connection(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connect_locally(server, client)
    assert delivered(server, client, b"by local socket") == [b"by local socket"]
    (descriptor,) = server._local._connections
    client.disconnect(server.address)
    assert select.select([descriptor], [], [], 20)[0]
    list(server.poll(0.1))
    assert not server._local._connections
    assert not client.send(server.address, b"lost")


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
