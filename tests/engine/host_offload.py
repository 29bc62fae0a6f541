"""vLLM's tiered offloading on a CPU: the cache that it offloads is in host memory already.

Descriptors, CPU memory, managers and tiers are vLLM's own. A copy is complete when it is submitted.
Source: vLLM 0.32, ``SingleDirectionOffloadingHandler`` in ``v1/kv_offload/cpu/gpu_worker.py``.
"""

import ctypes
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class DeviceTensor(torch.Tensor):
    """Memory of the host that vLLM takes for a device's."""

    is_xpu = True


class DoneAlready:
    """A stream, or an event, of a device that copies at once."""

    def wait_stream(self, _other: Any) -> None:
        """Nothing is in progress on another stream."""

    wait_event = record = wait_stream

    def synchronize(self) -> None:
        """Nothing is in progress."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: "DoneAlready") -> float:
        return 0.01


class _Endless(list[DoneAlready]):
    """A pool that is never empty, so that vLLM never creates a stream or event of a device."""

    def __bool__(self) -> bool:
        return True

    def pop(self, _at: Any = -1) -> DoneAlready:
        return DoneAlready()

    def append(self, _used: DoneAlready) -> None:
        pass


def _copy(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_order: bool) -> None:
    for source, target, nbytes in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)


class HostTieringSpec(TieringOffloadingSpec):
    """Give it as ``spec_name``, with this module as ``spec_module_path``."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker as on a GPU, with copies within the host's memory."""
        if self._worker is None:
            for cache in kv_caches.tensors:
                cache.tensor = cache.tensor.as_subclass(DeviceTensor)
            worker: Any = self.create_worker(kv_caches)
            for copies in (worker._store_handler, worker._load_handler):
                copies._swap_blocks_batch = _copy
                copies._stream_pool, copies._event_pool = _Endless(), _Endless()
            self._worker = worker
        return self._worker
