"""Completion pages: words that a peer sets, protection from writes, and refused pages."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from disagg.core import _native
from disagg.core.errors import RemoteProtocolError
from disagg.runtime import completion_page
from disagg.runtime.channel import Channel
from disagg.runtime.completion_page import NUM_WORDS, CompletionPage, CompletionPageView
from disagg.runtime.local_socket import (
    Invitation,
    LocalConnection,
    LocalListener,
)
from tests.runtime.conftest import SOURCE, raw_client


def num_descriptors() -> int:
    """How many descriptors this process has, without those of objects that nobody uses any more."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def accepts_page(listener: LocalListener, descriptor: int) -> bool:
    """Whether the listener accepts a client that sends `descriptor` with its token."""
    invitation = msgspec.msgpack.decode(listener.invite(SOURCE), type=Invitation)
    client, accepted = raw_client(listener)
    with client:
        socket.send_fds(client, [invitation.token], [descriptor])
        received = listener.take(accepted)
        assert received in (None, (SOURCE, []))
        return received is not None


@pytest.fixture
def page() -> Iterator[CompletionPage]:
    created = CompletionPage.make()
    assert created is not None
    yield created
    created.close()


@pytest.fixture
def polling_listener() -> Iterator[LocalListener]:
    server = LocalListener(polls=True)
    yield server
    server.close()


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
    assert accepts_page(listener, page.fileno())  # the client sends a page although the invitation asks for none
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
        assert channel.completion_page(1) is None


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
