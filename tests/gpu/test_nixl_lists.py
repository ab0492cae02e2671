"""Prepared lists of a GPU's memory, by NIXL between two GPUs."""

from __future__ import annotations

import importlib.util
import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from disagg.backends.base import BackendOptions, Op, TransferStatus
from tests.gpu.targets import PATIENCE_S, REGION_NBYTES, Memory, batch, settle

pytestmark = pytest.mark.gpu

BLOCK, COUNT = 1000, 5000


def _serve(pipe: Connection) -> None:
    from disagg.backends.nixl.backend import NixlBackend

    memory = Memory(1)
    memory.scramble(2)
    backend = NixlBackend(BackendOptions())
    backend.register(memory.regions)
    pipe.send((backend.endpoint(), memory.address(0), memory.read()))
    with suppress(EOFError):
        while pipe.recv() is not None:
            pipe.send(memory.read())
    backend.close()
    memory.close()


@pytest.mark.parametrize("op", Op)
def test_many_blocks_are_chosen_from_lists(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("engine nixl is not installed")
    from disagg.backends.nixl.backend import MIN_SELECTED, NixlBackend

    assert COUNT >= MIN_SELECTED
    made: list[int] = []
    make = NixlBackend._make

    def counted(self: NixlBackend, op: Op, ours: Any, theirs: Any) -> int:
        made.append(len(ours[1]))
        return make(self, op, ours, theirs)

    monkeypatch.setattr(NixlBackend, "_make", counted)
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    memory = Memory(0)
    memory.scramble(1)
    assert pipe.poll(PATIENCE_S)
    endpoint, there, far = pipe.recv()
    near = memory.read()
    backend = NixlBackend(BackendOptions())
    backend.register(memory.regions)
    peer = backend.connect(endpoint, epoch=1)
    rng = np.random.default_rng(5)
    ours, remote = (rng.permutation(REGION_NBYTES[0] // BLOCK)[:COUNT] * BLOCK for _ in range(2))
    source, destination = (memory.address(0) + ours).tolist(), (there + remote).tolist()
    if op is Op.READ:
        source, destination = destination, source
    transfer = backend.submit(op, peer, batch(source, destination, [BLOCK] * COUNT))
    assert settle(transfer) is TransferStatus.DONE, transfer.error
    assert made == [COUNT]
    at = memory.at(0)
    for mine, its in zip((at + ours).tolist(), (at + remote).tolist(), strict=True):
        if op is Op.WRITE:
            far[its : its + BLOCK] = near[mine : mine + BLOCK]
        else:
            near[mine : mine + BLOCK] = far[its : its + BLOCK]
    pipe.send("read")
    assert pipe.poll(PATIENCE_S)
    np.testing.assert_array_equal(pipe.recv(), far)
    np.testing.assert_array_equal(memory.read(), near)
    backend.close()
    memory.close()
    pipe.send(None)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
