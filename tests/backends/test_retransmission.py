"""The TCP connections of real engines notice soon that a cut link is back."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import pytest

from disagg.backends.base import BackendOptions, TransferStatus, Transport
from disagg.backends.mooncake.backend import MooncakeBackend
from disagg.backends.nixl.backend import NixlBackend
from disagg.machine.tcp import LONGEST_WAIT_S, sockets_of
from disagg.testing.contract import REGION_NBYTES, BackendFactory, ProcessTarget, batch_of
from tests.backends.conftest import opened, require_engine, target_process
from tests.support.tcp import longest_waits_ms

require_engine("nixl._bindings", "nixl")
require_engine("mooncake.engine", "mooncake-transfer-engine-non-cuda")

TCP = BackendOptions(require=Transport.TCP)
PATIENCE_S = 30.0


@pytest.mark.parametrize("engine", [NixlBackend, MooncakeBackend])
def test_connections_of_a_transfer_that_does_not_end_retransmit_soon(engine: BackendFactory, stack: ExitStack) -> None:
    target = target_process(engine, TCP, stack)
    backend, arena = opened(engine, TCP, stack)
    before = sockets_of("self")  # among them NIXL's connection to itself
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    target.connect(cast(ProcessTarget, SimpleNamespace(endpoint=backend.endpoint(), identity="nobody")))
    target.stop()
    transfer = backend.submit(peer, batch_of(arena, target.arena, [(0, 0, 0, 0, REGION_NBYTES[0])]))
    deadline = time.monotonic() + PATIENCE_S
    while set(longest_waits_ms(since=before)) != {LONGEST_WAIT_S * 1000}:
        assert transfer.poll() is TransferStatus.PENDING
        assert time.monotonic() < deadline
        time.sleep(0.01)
