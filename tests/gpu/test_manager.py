"""Whole requests between managers on two GPUs in two processes; every byte of every pool is compared with the reference."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from disagg import KVManager, ModelId, Pages, new_request_id
from disagg.backends.cuda.driver import second_gpu
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.state import paged
from disagg.testing import reference
from disagg.testing.reference import KVModel, KVRank, PageList
from tests.support.cluster import Side

pytestmark = pytest.mark.gpu

NHD, HND = "page token kv_head dim", "page kv_head token dim"
PATIENCE_S = 60.0
NUM_LAYERS = 3


@dataclass
class Rank:
    """One rank with its pools on a GPU."""

    spec: KVRank
    tensors: dict[int, tuple[Any, ...]]
    manager: KVManager

    def read(self) -> reference.Pools:
        return {layer: tuple(tensor.cpu().numpy() for tensor in tensors) for layer, tensors in self.tensors.items()}

    def write(self, pools: reference.Pools) -> None:
        import torch

        for layer, tensors in self.tensors.items():
            for tensor, pool in zip(tensors, pools[layer], strict=True):
                tensor.copy_(torch.from_numpy(pool))
        torch.cuda.synchronize()


def start(model: KVModel, side: Side, name: str, device: str, **settings: Any) -> list[Rank]:
    """Start every rank of an instance on one GPU. `settings` are arguments of `KVManager`."""
    import torch

    ranks: list[Rank] = []
    for number in range(side.topology.num_ranks):
        topology = side.topology.at(number)
        spec = KVRank(
            layers=tuple(range(NUM_LAYERS)),
            page_size=side.page,
            num_pages=side.num_pages,
            axes=side.axes,
            tp=side.tp,
            tp_rank=topology.tp_rank,
        )
        blank = reference.allocate(model, spec)
        tensors = {layer: tuple(torch.from_numpy(pool).to(device) for pool in pools) for layer, pools in blank.items()}
        torch.cuda.synchronize()
        manager = KVManager(
            name=name,
            topology=topology,
            components=[paged.gqa(tensors, axes=side.axes, num_kv_heads=model.num_kv_heads, topology=topology)],
            model=ModelId("toy"),
            leader=ranks[0].manager.address if ranks else None,
            **{"backend": NvlinkBackend, **settings},
        )
        ranks.append(Rank(spec, tensors, manager))
    return ranks


def serve_prefill(pipe: Connection, model: KVModel, side: Side) -> None:
    """The prefill instance, on GPU 0 in a child process."""
    ranks = start(model, side, "prefill-0", "cuda:0")
    pipe.send(ranks[0].manager.address)
    decode = pipe.recv()
    if decode is None:
        return
    for rank in ranks:
        rank.manager.add_peer("decode-0", address=decode)
    for rank in ranks:
        rank.manager.wait_ready("decode-0", timeout_s=PATIENCE_S)
    pipe.send("ready")
    with suppress(EOFError):
        while (request := pipe.recv()) is not None:
            pipe.send(send_request(model, ranks, *request))
    for rank in ranks:
        rank.manager.close()


def send_request(model: KVModel, ranks: list[Rank], request: bytes, seed: int, num_tokens: int, cut: int) -> list[bool]:
    """Fill every rank's pages and send them in two chunks, cut at token `cut`, or in one if `cut` is the end."""
    rng = np.random.default_rng(seed)
    senders = []
    for rank in ranks:
        pages = some_pages(rng, rank.spec, num_tokens)
        pools = reference.allocate(model, rank.spec)
        reference.fill(model, rank.spec, pools, pages, num_tokens=num_tokens)
        rank.write(pools)
        sender = rank.manager.sender(request, peer="decode-0", deadline_s=PATIENCE_S)
        rows = {"kv": Pages(np.array(pages.ids, dtype=np.int32), 0)}
        if cut < num_tokens:
            sender.send(rows, tokens=(0, cut))
            sender.send(rows, tokens=(cut, num_tokens))
        sender.finish(rows if cut == num_tokens else None, payload=b"token")
        senders.append(sender)
    return [sender.wait(timeout_s=PATIENCE_S).ok for sender in senders]


def some_pages(rng: np.random.Generator, spec: KVRank, num_tokens: int, first_token: int = 0) -> PageList:
    count = reference.pages_needed(spec, num_tokens=num_tokens, first_token=first_token)
    return PageList(tuple(rng.permutation(spec.num_pages)[:count].tolist()), first_token)


@contextmanager
def instances(model: KVModel, prefill: Side, decode: Side) -> Iterator[tuple[Connection, list[Rank]]]:
    """Prefill on GPU 0 in a child process, decode on the second GPU in this one."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve_prefill, args=(theirs, model, prefill))
    with ExitStack() as stack:
        process.start()
        theirs.close()
        stack.callback(process.join, PATIENCE_S)
        stack.callback(pipe.send, None)
        ranks = start(model, decode, "decode-0", f"cuda:{second_gpu()}")
        for rank in ranks:
            stack.callback(rank.manager.close)
        address = ask(pipe)
        for rank in ranks:
            rank.manager.add_peer("prefill-0", address=address)
        pipe.send(ranks[0].manager.address)
        for rank in ranks:
            rank.manager.wait_ready("prefill-0", timeout_s=PATIENCE_S)
        assert ask(pipe) == "ready"
        yield pipe, ranks
        for rank in ranks:
            assert rank.manager.health().ok, rank.manager.health().problem
    assert process.exitcode == 0


def ask(pipe: Connection, command: object = None) -> Any:
    if command is not None:
        pipe.send(command)
    assert pipe.poll(PATIENCE_S), f"no answer from the prefill process within {PATIENCE_S} s"
    return pipe.recv()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Side(), Side()),
        (Side(tp=2), Side(tp=1, page=16)),
        (Side(tp=1, axes=HND), Side(tp=2, page=8)),
        (Side(tp=3), Side(tp=2, axes=HND)),
        (Side(tp=4, page=16), Side(tp=6, page=2, num_pages=64)),
    ],
)
@pytest.mark.parametrize("dims", [(8, 6), (64, 64)])
def test_requests_from_gpu_to_gpu(prefill: Side, decode: Side, dims: tuple[int, int]) -> None:
    model = KVModel(num_kv_heads=6, dims=dict(zip("kv", dims, strict=True)), dtype="int16")
    with instances(model, prefill, decode) as (pipe, ranks):
        for seed, (first_token, num_tokens, cut) in enumerate([(0, 37, 19), (5, 61, 61), (16, 64, 33), (0, 64, 64)]):
            request, need = new_request_id(), (first_token, num_tokens)
            rng = np.random.default_rng(100 + seed)
            taken = [some_pages(rng, rank.spec, num_tokens, first_token) for rank in ranks]
            for rank in ranks:
                rank.write(reference.allocate(model, rank.spec))
            receivers = [
                rank.manager.receiver(
                    request,
                    peer="prefill-0",
                    rows={"kv": Pages(np.array(pages.ids, dtype=np.int32), pages.first_token)},
                    need={"kv": need},
                    deadline_s=PATIENCE_S,
                )
                for rank, pages in zip(ranks, taken, strict=True)
            ]
            assert all(ask(pipe, (request, seed, num_tokens, cut)))
            events = [receiver.wait(timeout_s=PATIENCE_S) for receiver in receivers]
            assert all(event.ok for event in events), [event.error for event in events]
            assert events[0].payload == b"token"
            for rank, pages in zip(ranks, taken, strict=True):
                wanted = reference.expected(model, rank.spec, pages, num_tokens=num_tokens, need=need)
                assert reference.first_difference(wanted, rank.read()) is None
