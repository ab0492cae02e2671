"""Short cuts between processes of one machine: who gets in, what arrives, and what happens where one cannot be used."""

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
from disagg.runtime import completion_page as boards
from disagg.runtime import local_socket as lanes
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

HERE = Source(b"connection", "key")


@pytest.fixture
def listener() -> Iterator[LocalListener]:
    made = LocalListener()
    yield made
    made.close()


@pytest.fixture
def opened(listener: LocalListener) -> Iterator[tuple[LocalConnection, int]]:
    lane = LocalConnection.open(listener.invite(HERE))
    assert lane is not None
    (descriptor,) = listener.accept()
    yield lane, descriptor
    lane.close()


def test_messages_arrive_in_order_with_their_source(listener: LocalListener, opened: tuple[LocalConnection, int]) -> None:
    lane, descriptor = opened
    said = [b"", b"one", bytes(1000), *(str(number).encode() for number in range(500))]
    assert lane.send(said) == len(said)
    assert listener.take(descriptor) == (HERE, said)
    assert listener.take(descriptor) == (HERE, [])


def test_an_offer_stays_the_same_as_long_as_its_connection(listener: LocalListener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert listener.invite(HERE) == listener.invite(HERE)
    assert listener.invite(HERE) != listener.invite(Source(b"another", "key"))
    monkeypatch.setattr(lanes, "MAX_INVITATIONS", 1)
    first = listener.invite(HERE)
    listener.invite(Source(b"a third", "key"))
    assert listener.invite(HERE) != first  # it was void


def test_several_packets_carry_what_one_does_not(listener: LocalListener, opened: tuple[LocalConnection, int]) -> None:
    lane, descriptor = opened
    said = [bytes([number]) * 30_000 for number in range(5)]
    assert lane.send(said) == 5
    assert listener.take(descriptor) == (HERE, said)


def test_what_does_not_fit_is_left_to_the_caller(listener: LocalListener, opened: tuple[LocalConnection, int]) -> None:
    lane, descriptor = opened
    long = bytes(MAX_PACKET_NBYTES)
    assert lane.send([b"short", long, b"after"]) == 1
    assert lane.send([long]) == 0
    assert listener.take(descriptor) == (HERE, [b"short"])
    sent = 0
    while (queued := lane.send([bytes(30_000)])) == 1:  # until nothing more is taken, since nobody reads
        sent += queued
    assert sent > 0
    _, found = listener.take(descriptor) or (None, [])
    assert len(found) == sent


def test_the_end_of_a_lane_is_found_after_what_was_queued(listener: LocalListener, opened: tuple[LocalConnection, int]) -> None:
    lane, descriptor = opened
    lane.send([b"last words"])
    lane.close()
    assert listener.take(descriptor) == (HERE, [b"last words"])
    assert listener.take(descriptor) is None
    listener.close_connection(descriptor)


def test_a_lane_that_the_peer_has_closed_cannot_be_sent_to(
    listener: LocalListener, opened: tuple[LocalConnection, int]
) -> None:
    lane, descriptor = opened
    listener.take(descriptor)
    listener.close_connection(descriptor)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        lane.send([b"to nobody"])


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["name", b"secret", 3]),
        msgspec.msgpack.encode([7, b"secret"]),
        msgspec.msgpack.encode(["nobody listens here", b"secret"]),
        msgspec.msgpack.encode(["x" * 200, b"secret"]),
        msgspec.msgpack.encode(["zero\0byte", b"secret"]),
    ],
)
def test_what_is_no_offer_within_reach_opens_nothing(offer: bytes) -> None:
    assert LocalConnection.open(offer) is None


def stranger(listener: LocalListener) -> tuple[socket.socket, int]:
    name = msgspec.msgpack.decode(listener.invite(HERE), type=Invitation).name
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.connect(f"\0{name}")
    (descriptor,) = listener.accept()
    return found, descriptor


@pytest.mark.parametrize("shown", [b"", b"guess", bytes(16), bytes(17)])
def test_a_stranger_without_the_secret_is_closed_out(listener: LocalListener, shown: bytes) -> None:
    found, descriptor = stranger(listener)
    with found:
        found.send(shown)
        assert listener.take(descriptor) is None
        listener.close_connection(descriptor)
        assert found.recv(1) == b""


def test_one_who_says_nothing_or_hangs_up_is_closed_out(listener: LocalListener) -> None:
    found, descriptor = stranger(listener)
    assert listener.take(descriptor) is None  # nothing was said, so there was nothing to look for
    found.close()
    assert listener.take(descriptor) is None
    silent = [stranger(listener) for _ in range(MAX_UNAUTHENTICATED)]
    assert listener.excess() == [descriptor]
    listener.close_connection(descriptor)
    assert listener.excess() == []
    for found, _ in silent:
        found.close()


def test_another_user_is_closed_out(listener: LocalListener, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = LocalConnection.open(listener.invite(HERE))
    assert lane is not None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert list(listener.accept()) == []
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        lane.send([b"hello"])
    lane.close()


@pytest.mark.parametrize("packet", [b"\x01", struct.pack("<I", 5) + b"four", struct.pack("<I", 1) + b"ab\x00\x00"])
def test_a_packet_that_is_none_ends_the_lane(listener: LocalListener, packet: bytes) -> None:
    offer = msgspec.msgpack.decode(listener.invite(HERE), type=Invitation)
    found, descriptor = stranger(listener)
    with found:
        found.send(offer.token)
        assert listener.take(descriptor) == (HERE, [])
        found.send(packet)
        taken = listener.take(descriptor)
        assert taken is None or taken == (HERE, [b"a"])


# -- boards ----------------------------------------------------------------------------------------------------------------


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def opens(listener: LocalListener, descriptor: int) -> bool:
    """Whether a lane is opened by a peer that gives a descriptor with the secret."""
    offer = msgspec.msgpack.decode(listener.invite(HERE), type=Invitation)
    found, lane = stranger(listener)
    with found:
        socket.send_fds(found, [offer.token], [descriptor])
        taken = listener.take(lane)
        assert taken in (None, (HERE, []))
        return taken is not None


@pytest.fixture
def board() -> Iterator[CompletionPage]:
    made = CompletionPage.make()
    assert made is not None
    yield made
    made.close()


@pytest.fixture
def looking() -> Iterator[LocalListener]:
    made = LocalListener(polls=True)
    yield made
    made.close()


def test_a_word_is_seen_once_its_sign_shows(looking: LocalListener, board: CompletionPage) -> None:
    sign = _native.Flag()
    lane = LocalConnection.open(looking.invite(HERE), board)
    assert lane is not None
    assert lane.polled
    (descriptor,) = looking.accept()
    assert looking.take(descriptor) == (HERE, [])
    view = looking.page_of(HERE)
    assert view is not None
    lane.close()
    assert looking.take(descriptor) is None
    looking.close_connection(descriptor)
    assert looking.page_of(HERE) is None  # but those that are looked at already
    notices = [board.signal(sign) for _ in range(NUM_WORDS + 1)]
    words = [view.word(*seen) for _, seen in notices]
    assert len({value for _, (_, value) in notices}) == len(notices)
    notice, word = notices[0][0], words[0]
    assert not _native.busy_poll(0.0, completions=[notice, word])
    assert not word.is_set()
    sign.set()
    assert _native.busy_poll(0.0, completions=[notice])
    assert [each.is_set() for each in words] == [True] + [False] * NUM_WORDS
    notices[-1][0].signal()  # the same word, for something else
    assert [each.is_set() for each in words] == [False] * NUM_WORDS + [True]
    assert _native.busy_poll(10.0, completions=[words[-1]])


def test_no_board_where_nobody_looks(listener: LocalListener, board: CompletionPage) -> None:
    assert len(msgspec.msgpack.decode(listener.invite(HERE))) == 2
    lane = LocalConnection.open(listener.invite(HERE), board)
    assert lane is not None
    assert not lane.polled
    lane.close()
    assert len(list(listener.accept())) == 1
    assert opens(listener, board.fileno())  # given all the same
    assert listener.page_of(HERE) is None


def test_who_is_shown_a_board_cannot_write_there(board: CompletionPage) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(board.fileno(), 4096)
    with pytest.raises(PermissionError):
        os.pwrite(board.fileno(), b"1", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(board.fileno(), 0)
    view = CompletionPageView.of(board.fileno())
    assert view is not None
    notice, seen = board.signal(_native.Flag())
    with pytest.raises(TypeError):
        _native.CompletionSignal(_native.Flag(), view._words, *seen)
    assert not view.word(*seen).is_set()
    notice.signal()
    assert view.word(*seen).is_set()


def test_a_board_is_shown_to_processes_of_this_user_only(
    looking: LocalListener, board: CompletionPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = looking.invite(HERE)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert LocalConnection.open(offer, board) is None


def test_where_the_system_cannot_keep_a_board_from_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_descriptors()
    monkeypatch.setattr(boards, "_F_SEAL_FUTURE_WRITE", 1 << 30)
    assert CompletionPage.make() is None
    assert num_descriptors() == before
    with contextlib.closing(Channel("tcp://127.0.0.1:0", polls=True)) as channel:
        assert channel.completion_page("tcp://127.0.0.1:1") is None


def test_a_new_lane_brings_its_own_board(looking: LocalListener, board: CompletionPage) -> None:
    lanes, descriptors = [], []
    for each in (board, board):
        lane = LocalConnection.open(looking.invite(HERE), each)
        assert lane is not None
        (descriptor,) = looking.accept()
        assert looking.take(descriptor) == (HERE, [])
        lanes.append(lane)
        descriptors.append(descriptor)
    looking.close_connection(descriptors[0])
    assert looking.page_of(HERE) is not None
    looking.close_connection(descriptors[1])
    assert looking.page_of(HERE) is None
    for lane in lanes:
        lane.close()


@pytest.mark.parametrize("kind", ["pipe", "small", "large", "not sealed", "empty"])
def test_what_is_no_board_is_not_looked_at(looking: LocalListener, kind: str) -> None:
    if kind == "pipe":
        descriptor, other = os.pipe()
        os.close(other)
    else:
        descriptor = os.memfd_create("stranger", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, {"small": 8, "large": 2 << 20, "not sealed": 4096, "empty": 0}[kind])
        if kind != "not sealed":
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    before = num_descriptors()
    assert not opens(looking, descriptor)
    assert looking.page_of(HERE) is None
    assert num_descriptors() == before + 1  # the lane that was accepted
    os.close(descriptor)


@pytest.mark.parametrize("index", [NUM_WORDS, 2**31 - 1])
def test_a_word_that_a_board_does_not_have(index: int) -> None:
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


def let_in(server: Channel, client: Channel) -> bytes:
    """A hello, and a welcome that offers a lane, taken; the connection."""
    client.send(server.address, b"hello")
    client.flush()
    (hello,) = until(server, 1)
    assert isinstance(hello, Inbound)
    server.reply(hello.connection, b"welcome", offer_local=True)
    assert until(client, 1) == [Reply(server.address, b"welcome")]
    return hello.connection


def carried(server: Channel, client: Channel, said: bytes) -> list[bytes]:
    """What arrives of one message."""
    client.send(server.address, said)
    client.flush()
    return [found.data for found in until(server, 1)]


def test_messages_for_one_address_leave_together_and_arrive_one_by_one(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    said = [str(number).encode() for number in range(200)]
    for message in said:
        client.send(server.address, message)
    client.flush()
    assert [found.data for found in until(server, 200)] == said


def test_after_a_welcome_messages_take_the_lane_as_from_the_same_connection(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connection = let_in(server, client)
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
    lane = client._peers[server.address].local
    assert until(client, 1) == [Reply(server.address, b"again")]
    assert client._peers[server.address].local is lane


def test_a_message_in_a_lane_wakes_whoever_polls(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    let_in(server, client)
    assert carried(server, client, b"first") == [b"first"]
    client.send(server.address, b"second")
    client.flush()
    assert len(list(server.poll(30.0))) == 1


def test_where_a_lane_has_ended_messages_go_by_tcp(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    let_in(server, client)
    assert carried(server, client, b"by lane") == [b"by lane"]
    for descriptor in list(server._local._connections):
        server._close_local(descriptor)
    assert carried(server, client, b"by tcp") == [b"by tcp"]
    assert client._peers[server.address].local is None


def test_hanging_up_closes_the_lane_and_its_far_end(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    let_in(server, client)
    assert carried(server, client, b"by lane") == [b"by lane"]
    (descriptor,) = server._local._connections
    client.disconnect(server.address)
    assert select.select([descriptor], [], [], 20)[0]
    list(server.poll(0.1))
    assert not server._local._connections
    assert not client.send(server.address, b"to nobody")


def test_a_crowd_of_silent_strangers_is_kept_small(channels: tuple[Channel, Channel]) -> None:
    server, client = channels
    connection = let_in(server, client)
    name = msgspec.msgpack.decode(server._local.invite(Source(connection, "")), type=Invitation).name
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(MAX_UNAUTHENTICATED + 5)]
    for found in crowd:
        found.connect(f"\0{name}")
        list(server.poll(0.1))
    assert len(server._local._unauthenticated) <= MAX_UNAUTHENTICATED
    assert carried(server, client, b"still heard") == [b"still heard"]
    for found in crowd:
        found.close()
