"""Channels: messages over local connections, and over TCP where there is none."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import msgspec
import pytest

from disagg.runtime.channel import Channel, Inbound, Reply
from disagg.runtime.local_socket import (
    MAX_PACKET_NBYTES,
    MAX_UNAUTHENTICATED,
    Invitation,
    Source,
)


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    server, client = Channel("tcp://127.0.0.1:0"), Channel("tcp://127.0.0.1:0")
    client.connect(server.address)
    yield server, client
    client.close()
    server.close()


def until(channel: Channel, count: int) -> list[Inbound | Reply]:
    """Poll until a channel has received `count` messages."""
    received: list[Inbound | Reply] = []
    for _ in range(200):
        received += channel.poll(0.1)
        if len(received) >= count:
            break
    return received


def connect_locally(server: Channel, client: Channel) -> bytes:
    """Exchange a hello and a welcome with an invitation; return the server's connection."""
    client.send(server.address, b"hello")
    client.flush()
    (hello,) = until(server, 1)
    assert isinstance(hello, Inbound)
    server.reply(hello.connection, b"welcome", offer_local=True)
    assert until(client, 1) == [Reply(server.address, b"welcome")]
    return hello.connection


def delivered(server: Channel, client: Channel, message: bytes) -> list[bytes]:
    """Send one message and return what the server receives."""
    client.send(server.address, message)
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
