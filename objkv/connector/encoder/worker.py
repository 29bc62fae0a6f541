"""The worker's side of the encoder cache: adds the plan's outputs and saves encoded ones.

Every rank adds the same bytes to vLLM's encoder cache, which has a place for them and relies on
them, so a load may fail only if memory is short. All ranks encode the same outputs, and one rank
saves them. Source of the call order: vLLM 0.32-0.33,
``v1/worker/ec_connector_model_runner_mixin.py`` and ``v1/worker/gpu/ec_connector.py``.
"""

import hashlib
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from os import getpid
from threading import Lock
from time import monotonic, time
from typing import Any

import torch

from objkv.cache.chunks import ChunkCache
from objkv.cache.saving import SavePool
from objkv.codec.payload import Claim, Header, Provenance, encode_in_place, header_room
from objkv.connector.encoder.copies import OutputCopies
from objkv.connector.encoder.items import EncoderOutput, EncoderPlan, EncoderReport, ItemLoad
from objkv.telemetry import MemoryRecorder, Recorder
from objkv.transfer.paging import DTYPE_NAMES

_THREADS = 2


@dataclass(frozen=True, slots=True)
class EncoderSaveLimits:
    """Bounds of the saver, and the codec and writer of its payloads."""

    queue_max: int
    held_bytes_max: int
    """Bytes of tensors kept alive until they are saved."""
    item_bytes_max: int
    deadline_s: float
    """An output that waited longer is dropped."""
    codec: str
    """A codec of the payload format."""
    writer: str


@dataclass(frozen=True, slots=True)
class SavedOutput:
    """An encoder output that is kept alive until it is saved."""

    output: EncoderOutput
    claim: Claim
    tensor: torch.Tensor
    computed: Any
    """A mark of ``OutputCopies`` after which the tensor contains the output."""
    deadline: float
    saver: "EncoderSaver"

    def encode(self) -> tuple[memoryview, Header]:
        """See ``Save``."""
        return self.saver.encode(self)

    def release(self) -> None:
        """See ``Save``."""
        self.saver.release(self.output)


class EncoderSaver:
    """Saves encoder outputs in the background. The forward thread calls ``submit``, which only
    queues the tensor.

    An output in vLLM's encoder cache is never written again, so it can be read at any time. The
    queue keeps it alive until then, within ``held_bytes_max``. If the queue is full, the output is
    dropped and counted, without waiting.
    """

    def __init__(
        self,
        cache: ChunkCache,
        limits: EncoderSaveLimits,
        recorder: Recorder,
        *,
        copies: OutputCopies,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``copies``: of the device on which the outputs are."""
        self._cache = cache
        self._limits = limits
        self._recorder = recorder
        self._copies = copies
        self._clock = clock
        self._lock = Lock()
        self._held_bytes = 0
        self._pool: SavePool[SavedOutput] = SavePool(
            "encoder saves",
            _THREADS,
            cache,
            recorder,
            late=self._count_drop,
            begin=copies.adopt_thread,
            clock=clock,
        )

    def submit(
        self, output: EncoderOutput, tensor: torch.Tensor, *, replaces: bool = False
    ) -> None:
        """Save ``tensor``, ``[embeds, width]``, which is never written again. Never waits."""
        claim, nbytes, limits = output.claim, output.layer.nbytes, self._limits
        if nbytes > limits.item_bytes_max:
            self._recorder.count("save_unsupported")
            return
        if replaces:  # so that the put replaces the corrupt payload
            self._cache.reject(claim.key, {}, corrupt=True)
        if not replaces and not self._cache.has_room():
            self._recorder.count("save_over_quota")
            return
        if not self._cache.begin_save(claim.key):
            self._recorder.count("save_repeats")
            return
        deadline = self._clock() + limits.deadline_s
        save = SavedOutput(output, claim, tensor, self._copies.mark(), deadline, self)
        with self._lock:
            self._held_bytes += nbytes
            fits = self._held_bytes <= limits.held_bytes_max
        if not (fits and self._pool.waiting < limits.queue_max and self._pool.put((save,))):
            self._drop_all((save,))

    def drain(self, seconds: float) -> bool:
        """Wait for all saves, for at most ``seconds``. Returns whether all have ended."""
        return self._pool.drain(seconds)

    def close(self, drain_s: float) -> None:
        """Drain within the bound, then stop. Remaining outputs are dropped."""
        self._pool.close(drain_s, self._drop_all)
        self._cache.close(0.0)

    def encode(self, save: SavedOutput) -> tuple[memoryview, Header]:
        """Encode the payload of an output. Called on a thread of the pool."""
        claim, layers, seal = save.claim, (save.output.layer,), self._cache.seal
        provenance = Provenance(
            token_digest=hashlib.sha256(claim.key.prefix_hash).hexdigest(),
            writer=self._limits.writer,
            created_s=int(time()),
        )
        # The device copies straight into the payload's memory.
        buffer = self._copies.to_host(save.tensor, save.computed, header_room(layers))
        return encode_in_place(
            claim, layers, buffer, codec=self._limits.codec, provenance=provenance, seal=seal
        )

    def release(self, output: EncoderOutput) -> None:
        """Release the memory of an output."""
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


_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
EncoderCache = MutableMapping[str, torch.Tensor]
"""vLLM's outputs by identifier: ``[embeds, width]`` on the worker's device, never written again."""


class EncoderWorkerSide:
    """The worker's half of the encoder cache. All methods are called by the forward thread."""

    def __init__(
        self,
        copies: OutputCopies,
        dtype: str,
        saver: EncoderSaver | None,
        recorder: MemoryRecorder,
        *,
        drain_s: float,
    ) -> None:
        """
        Args:
            copies: of the device of vLLM's encoder cache.
            dtype: the dtype of outputs that can be loaded again.
            saver: None if this rank saves nothing.
        """
        self._copies = copies
        self._dtype = dtype
        self._saver = saver
        self._recorder = recorder
        self._drain_s = drain_s
        self._closed = False
        self._pid = getpid()

    def load(self, plan: EncoderPlan, cache: EncoderCache) -> None:
        """Add the plan's outputs to ``cache``, except those that it already has."""
        for load in plan.loads:
            if load.identifier not in cache:
                cache[load.identifier] = self._tensor(load)

    def save(self, plan: EncoderPlan, cache: EncoderCache, identifier: str) -> None:
        """Save an output that was just encoded, in the background, if the plan contains it."""
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
        """Return the numbers since the last call."""
        numbers = self._recorder.drain()
        return EncoderReport(numbers) if numbers else None

    def drain_saves(self, seconds: float) -> bool:
        """Wait until nothing is being saved. Returns whether that was so within the bound."""
        return self._saver is None or self._saver.drain(seconds)

    def close(self) -> None:
        """Drain saves within the configured bound, then stop. Idempotent."""
        if self._closed or getpid() != self._pid:
            return  # a forked process has none of its parent's threads
        self._closed = True
        if self._saver is not None:
            self._saver.close(self._drain_s)

    def _tensor(self, load: ItemLoad) -> torch.Tensor:
        """Copy an output into a new tensor. The plan's bytes may belong to the scheduler or to a
        message."""
        output = load.output
        dtype = _DTYPES[output.dtype]
        return self._copies.to_device(load.pages, output.embeds, output.width, dtype)
