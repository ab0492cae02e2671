"""vLLM's OffloadingConnector on the CPU. vLLM's own spec starts on GPUs only, since its worker copies by GPU streams; here
another worker copies the blocks. vLLM loads this module by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 26,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": __name__,
    },
}
"""The connector in vLLM's `KVTransferConfig`."""


STORE_STEPS = 8
"""How many steps a copy to the host takes, unless somebody waits for it: those of a GPU run beside its computations."""


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole blocks, in the order in which it is asked."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._caches = [each.tensor for each in caches.tensors]
        self._stored = [torch.empty((num_chunks, *cache.shape[1:]), dtype=cache.dtype) for cache in self._caches]
        self._stores: dict[int, tuple[int, GPULoadStoreSpec, CPULoadStoreSpec]] = {}  # with the step in which it ends
        self._step = 0
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        self._stores[job_id] = self._step + STORE_STEPS, src_spec, dst_spec
        return True

    def _store(self, job_id: int) -> None:
        _, src_spec, dst_spec = self._stores.pop(job_id)
        for cache, stored in zip(self._caches, self._stored, strict=True):
            stored[dst_spec.block_ids] = cache[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, success=True))

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for cache, stored in zip(self._caches, self._stored, strict=True):
            cache[dst_spec.block_ids] = stored[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        self._step += 1
        for job_id in [job_id for job_id, (until, *_) in self._stores.items() if until <= self._step]:
            self._store(job_id)
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(self._stores.keys() & job_ids):
            self._store(job_id)


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """VLLM's spec, with that worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        return HostWorker(kv_caches, self.num_chunks)
