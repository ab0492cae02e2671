"""The smallest use of disagg: prefill and decode in one process, with the `local` backend."""

import numpy as np

from disagg import KVManager, ModelId, Topology, new_request_id
from disagg.state import paged


def start(name: str, axes: str, shape: tuple[int, ...]) -> tuple[np.ndarray, KVManager]:
    """Start a rank: its KV cache, and a manager for it."""
    cache = np.zeros((2, *shape), np.float16)
    topology = Topology()  # one rank; with four: Topology(tp=4, tp_rank=r)
    kv = paged.gqa({0: (cache[0], cache[1])}, axes=axes, num_kv_heads=2, topology=topology)
    return cache, KVManager(name=name, components=[kv], model=ModelId("my-model"), backend="local", admit="any")


# pages of 4 tokens for prefill, of 8 tokens and another axis order for decode
source, prefill = start("prefill-0", "nhd", (10, 4, 2, 16))
destination, decode = start("decode-0", "hnd", (6, 2, 8, 16))
with prefill, decode:
    source[:, [7, 2]] = np.random.default_rng(0).random((2, 2, 4, 2, 16))  # tokens 0 to 7 are in pages 7 and 2
    request_id = new_request_id()
    sender = prefill.sender(request_id)  # for whoever asks
    sender.finish({"kv": [7, 2]}, payload=b"first token")
    receiver = decode.receiver(request_id, peer="prefill-0", address=prefill.address, rows={"kv": [5]}, need={"kv": (0, 8)})
    event = receiver.wait(timeout_s=30)
    assert event.ok, event.error
    assert event.payload == b"first token"

tokens = source[:, [7, 2]].reshape(2, 8, 2, 16)
assert np.array_equal(destination[:, 5].transpose(0, 2, 1, 3), tokens)

print("8 tokens arrived, byte for byte")
