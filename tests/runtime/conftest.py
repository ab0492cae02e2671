"""A listener of local connections, and a raw client of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from disagg.runtime.local_socket import (
    Invitation,
    LocalListener,
    Source,
)

SOURCE = Source(b"connection", "key")


@pytest.fixture
def listener() -> Iterator[LocalListener]:
    server = LocalListener()
    yield server
    server.close()


def raw_client(listener: LocalListener) -> tuple[socket.socket, int]:
    """A connected socket that has sent nothing, and the accepted descriptor."""
    name = msgspec.msgpack.decode(listener.invite(SOURCE), type=Invitation).name
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(f"\0{name}")
    (descriptor,) = listener.accept()
    return client, descriptor
