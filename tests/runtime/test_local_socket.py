"""Local connections: invitations, accepted and refused clients, and delivered messages."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import msgspec
import pytest

from disagg.runtime import local_socket
from disagg.runtime.local_socket import (
    MAX_PACKET_NBYTES,
    MAX_UNAUTHENTICATED,
    Invitation,
    LocalConnection,
    LocalListener,
    Source,
)
from tests.runtime.conftest import SOURCE, raw_client


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


def test_an_invitation_is_the_same_for_the_life_of_its_connection(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listener.invite(SOURCE) == listener.invite(SOURCE)
    assert listener.invite(SOURCE) != listener.invite(Source(b"another", "key"))
    monkeypatch.setattr(local_socket, "MAX_INVITATIONS", 1)
    first = listener.invite(SOURCE)
    listener.invite(Source(b"a third", "key"))
    assert listener.invite(SOURCE) != first  # the first invitation was dropped


def test_messages_beyond_one_packet_are_split_over_several(
    listener: LocalListener, opened: tuple[LocalConnection, int]
) -> None:
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
    _, received = listener.take(descriptor) or (None, [])
    assert len(received) == sent


def test_a_closed_connection_delivers_its_queued_messages_before_its_end(
    listener: LocalListener, opened: tuple[LocalConnection, int]
) -> None:
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
    assert listener.take(descriptor) is None  # the client has sent nothing
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
        received = listener.take(descriptor)
        assert received is None or received == (SOURCE, [b"a"])
