"""The worker's side of the encoder cache: puts in what the plan brings, saves what was encoded.

Every rank puts the same bytes into vLLM's encoder cache, which has a place for them and counts on
them: nothing here may fail but for want of memory. Of the ranks, which all encode the same, one
saves. Source of the call order: vLLM 0.32-0.33, ``v1/worker/ec_connector_model_runner_mixin.py``
and ``v1/worker/gpu/ec_connector.py``.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from os import getpid
from threading import Lock
from time import monotonic, time
from typing import Any

import numpy as np
import torch

from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import Claim, Header, Provenance, encode, open_payload
from objkv.connector.encoder.items import EncoderOutput, EncoderPlan, EncoderReport, ItemLoad
from objkv.telemetry import MemoryRecorder, Recorder
from objkv.transfer.background import SavePool
from objkv.transfer.paging import DTYPE_NAMES

_THREADS = 2


@dataclass(frozen=True, slots=True)
class EncoderSaveLimits:
    """Bounds of the saver, and what it writes into payloads."""

    queue_max: int
    held_bytes_max: int
    """Bytes of tensors kept alive until they are saved."""
    item_bytes_max: int
    deadline_s: float
    """An output that waited longer is dropped."""
    codec: str
    """An id of the format."""
    writer: str


@dataclass(frozen=True, slots=True)
class SavedOutput:
    """An encoder output that is kept alive until it is saved."""

    output: EncoderOutput
    claim: Claim
    tensor: torch.Tensor
    encoded: Any
    """CUDA event after which the tensor holds the output; None on the host."""
    deadline: float
    saver: "EncoderSaver"

    def encode(self) -> tuple[memoryview, Header]:
        """See ``Save``."""
        return self.saver.encode(self)

    def release(self) -> None:
        """See ``Save``."""
        self.saver.release(self.output)

    def pages(self) -> memoryview:
        """The output's bytes in host memory, contiguous."""
        tensor = self.tensor
        if self.encoded is not None:
            # On a stream of its own: computing neither waits for this copy nor is waited for.
            stream = torch.cuda.Stream(tensor.device)
            stream.wait_event(self.encoded)
            with torch.cuda.stream(stream):
                tensor = tensor.cpu()
        flat: memoryview = tensor.contiguous().view(torch.uint8).view(-1).numpy().data
        return flat


class EncoderSaver:
    """Saves encoder outputs in the background. ``submit`` belongs to the forward thread, and only
    remembers a tensor.

    An output is never written again once it is in vLLM's encoder cache, so it may be read whenever
    there is time; until then it is kept alive, which is what the bound in bytes is for. A full
    queue is a drop: counted, never waited for.
    """

    def __init__(
        self,
        cache: ChunkCache,
        limits: EncoderSaveLimits,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._recorder = recorder
        self._clock = clock
        self._lock = Lock()
        self._held_bytes = 0
        self._pool: SavePool[SavedOutput] = SavePool(
            "encoder saves", _THREADS, cache, recorder, late=self._count_drop, clock=clock
        )

    def submit(
        self, output: EncoderOutput, tensor: torch.Tensor, *, replaces: bool = False
    ) -> None:
        """Save ``tensor``, ``[embeds, width]``, which is never written again. Never waits."""
        claim, nbytes, limits = output.claim, output.layer.nbytes, self._limits
        if nbytes > limits.item_bytes_max:
            self._recorder.count("save_unsupported")
            return
        if replaces:  # so that it is put over the payload that was found corrupt
            self._cache.reject(claim.key, {}, corrupt=True)
        if not replaces and not self._cache.has_room():
            self._recorder.count("save_over_quota")
            return
        if not self._cache.begin_save(claim.key):
            self._recorder.count("save_repeats")
            return
        event = None
        if tensor.is_cuda:
            event = torch.cuda.Event()
            event.record()
        deadline = self._clock() + limits.deadline_s
        save = SavedOutput(output, claim, tensor, event, deadline, self)
        with self._lock:
            self._held_bytes += nbytes
            fits = self._held_bytes <= limits.held_bytes_max
        if not (fits and self._pool.waiting < limits.queue_max and self._pool.put((save,))):
            self._drop_all((save,))

    def drain(self, seconds: float) -> bool:
        """Wait until all saves are through, at most ``seconds``; True if they are."""
        return self._pool.drain(seconds)

    def close(self, drain_s: float) -> None:
        """Drain within the bound, then stop; what is left is dropped."""
        self._pool.close(drain_s, self._drop_all)
        self._cache.close(0.0)

    def encode(self, save: SavedOutput) -> tuple[memoryview, Header]:
        """The payload of an output, on a thread of the pool."""
        claim, layers, seal = save.claim, (save.output.layer,), self._cache.seal
        provenance = Provenance(
            token_digest=hashlib.sha256(claim.key.prefix_hash).hexdigest(),
            writer=self._limits.writer,
            created_s=int(time()),
        )
        payload = encode(
            claim,
            layers,
            [save.pages()],
            codec=self._limits.codec,
            provenance=provenance,
            seal=seal,
        )
        return payload, open_payload(payload, claim, layers, seal=seal)

    def release(self, output: EncoderOutput) -> None:
        """An output is held no longer."""
        with self._lock:
            self._held_bytes -= output.layer.nbytes

    def __repr__(self) -> str:
        return f"<EncoderSaver {self._pool}>"

    def _drop_all(self, saves: Iterable[SavedOutput]) -> None:
        for save in saves:
            self._count_drop(save)
            save.release()
            self._cache.end_save(save.claim.key)

    def _count_drop(self, _save: SavedOutput) -> None:
        self._recorder.count("save_drops")


logger = logging.getLogger(__name__)
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
EncoderCache = MutableMapping[str, torch.Tensor]
"""vLLM's own, by identifier: ``[embeds, width]`` on the worker's device, never written again."""


class EncoderWorkerSide:
    """All methods are called by the worker's forward thread."""

    def __init__(
        self,
        device: torch.device,
        dtype: str,
        saver: EncoderSaver | None,
        recorder: MemoryRecorder,
        *,
        drain_s: float,
    ) -> None:
        """``dtype``: of outputs that can be loaded again. ``saver``: None where this rank saves
        nothing."""
        self._device = device
        self._dtype = dtype
        self._saver = saver
        self._recorder = recorder
        self._drain_s = drain_s
        self._closed = False
        self._pid = getpid()

    def load(self, plan: EncoderPlan, cache: EncoderCache) -> None:
        """Put the plan's outputs into ``cache``, but for those that are there."""
        for load in plan.loads:
            if load.identifier not in cache:
                cache[load.identifier] = self._tensor(load)

    def save(self, plan: EncoderPlan, cache: EncoderCache, identifier: str) -> None:
        """Save an output that was just encoded, in the background, if the plan says so."""
        save = plan.saves.get(identifier)
        if save is None or self._saver is None:
            return
        encoded = cache[identifier].detach()
        dtype = DTYPE_NAMES.get(encoded.dtype)
        if encoded.dim() != 2 or encoded.shape[0] != save.embeds or dtype != self._dtype:
            self._recorder.count("save_unsupported")
            return
        rows, width = encoded.shape
        output = EncoderOutput(plan.namespace, save.item_hash, rows, width, self._dtype)
        self._saver.submit(output, encoded, replaces=save.replaces)

    def take_report(self) -> EncoderReport | None:
        """What was counted since the last call."""
        numbers = self._recorder.drain()
        return EncoderReport(numbers) if numbers else None

    def close(self) -> None:
        """Drain saves within the configured bound, then stop. Idempotent."""
        if self._closed or getpid() != self._pid:
            return  # a fork that ends has none of its parent's threads to wait for
        self._closed = True
        if self._saver is not None:
            self._saver.close(self._drain_s)

    def _tensor(self, load: ItemLoad) -> torch.Tensor:
        """A tensor of its own: the plan's bytes may be the scheduler's, or a message's."""
        output = load.output
        tensor = torch.empty((output.embeds, output.width), dtype=_DTYPES[output.dtype])
        np.copyto(tensor.view(torch.uint8).view(-1).numpy(), load.pages)
        return tensor.to(self._device)
