"""The smallest embed: prefill and decode in one process, over the backend that needs no engine."""

import numpy as np

from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.state import paged


def start(name: str, axes: str, shape: tuple[int, ...]) -> tuple[np.ndarray, KVManager]:
    """A rank: its KV cache, and a manager over it."""
    topology = Topology()  # tp=1; Topology(tp=4, tp_rank=r) on rank r of four
    cache = np.zeros((2, *shape), np.float16)
    kv = paged.gqa({0: (cache[0], cache[1])}, axes=axes, num_kv_heads=2, topology=topology)
    return cache, KVManager(name=name, topology=topology, components=[kv], model=ModelId("my-model"), backend="local")


# prefill has pages of 4 tokens, decode pages of 8 with another axis order
ours, prefill = start("prefill-0", "page token kv_head dim", (10, 4, 2, 16))
theirs, decode = start("decode-0", "page kv_head token dim", (6, 2, 8, 16))
with prefill, decode:
    prefill.add_peer("decode-0", address=decode.address)
    decode.add_peer("prefill-0", address=prefill.address)
    prefill.wait_ready("decode-0")  # layouts are compared here, before anything moves
    decode.wait_ready("prefill-0")

    ours[:, [7, 2]] = np.random.default_rng(0).random((2, 2, 4, 2, 16))  # tokens 0 to 7 are in pages 7 and 2
    request_id = new_request_id()
    receiver = decode.receiver(request_id, peer="prefill-0", rows={"kv": Pages(np.array([5]))}, need={"kv": (0, 8)})
    sender = prefill.sender(request_id, peer="decode-0")
    sender.send({"kv": Pages(np.array([7, 2]))}, tokens=(0, 8))
    sender.finish(payload=b"first token")

    event = receiver.wait(timeout_s=30)
    assert event.ok
    assert event.payload == b"first token"

tokens = ours[:, [7, 2]].reshape(2, 8, 2, 16)
assert np.array_equal(theirs[:, 5].transpose(0, 2, 1, 3), tokens)

print("8 tokens arrived, byte for byte")
