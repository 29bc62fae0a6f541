"""The worker's side of the encoder cache: adds the plan's outputs and saves encoded ones.

Every rank adds the same bytes to vLLM's encoder cache, which has a place for them and relies on
them, so a load may fail only if memory is short. All ranks encode the same outputs, and one rank
saves them. Source of the call order: vLLM 0.32-0.33,
``v1/worker/ec_connector_model_runner_mixin.py`` and ``v1/worker/gpu/ec_connector.py``.
"""

import hashlib
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from os import getpid
from threading import Lock
from time import monotonic
from typing import Any

import torch

from objkv.agent.payloads import PayloadWriter, WriteOutcome
from objkv.codec.payload import Claim, LayerSpec
from objkv.connector.encoder.copies import OutputCopies
from objkv.connector.encoder.items import EncoderOutput, EncoderPlan, EncoderReport, ItemLoad
from objkv.telemetry import MemoryRecorder
from objkv.transfer.paging import DTYPE_NAMES

_COUNTERS = {
    WriteOutcome.ACCEPTED: "saves_accepted",
    WriteOutcome.KEPT: "saves_accepted",
    WriteOutcome.EXISTED: "save_existed",
    WriteOutcome.REPEATED: "save_repeats",
    WriteOutcome.OVER_QUOTA: "save_over_quota",
    WriteOutcome.SHED: "saves_shed",
    WriteOutcome.LATE: "save_drops",
    WriteOutcome.DROPPED: "save_drops",
    WriteOutcome.FAILED: "save_errors",
}


_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
EncoderCache = MutableMapping[str, torch.Tensor]
"""vLLM's outputs by identifier: ``[embeds, width]`` on the worker's device, never written again."""


@dataclass(frozen=True, slots=True)
class EncoderSaveLimits:
    """Bounds of saves."""

    queue_max: int
    held_bytes_max: int
    """Bytes of tensors kept alive until they are saved."""
    item_bytes_max: int
    deadline_s: float
    """An output that waited longer is dropped."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedOutput:
    """An encoder output that is kept alive until it is saved: a ``PayloadWrite``."""

    output: EncoderOutput
    tensor: torch.Tensor
    """``[embeds, width]``. It is never written again, so it can be read at any time."""
    computed: Any
    """A mark of ``OutputCopies`` after which the tensor contains the output."""
    deadline: float
    side: "EncoderWorkerSide"

    @property
    def claim(self) -> Claim:
        """See ``PayloadWrite``."""
        return self.output.claim

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """See ``PayloadWrite``."""
        return (self.output.layer,)

    @property
    def token_digest(self) -> str:
        """A digest of its name: it has no tokens."""
        return hashlib.sha256(self.output.item_hash).hexdigest()

    def write(self, pages: memoryview) -> None:
        """See ``PayloadWrite``."""
        self.side.copies.to_host(self.tensor, self.computed, pages)

    def end(self, outcome: WriteOutcome, nbytes: int) -> None:
        """See ``PayloadWrite``."""
        self.side.ended(self, outcome, nbytes)


class EncoderWorkerSide:
    """The worker's half of the encoder cache. The forward thread calls all methods but ``ended``,
    and waits only in ``drain_saves`` and ``close``."""

    def __init__(
        self,
        copies: OutputCopies,
        dtype: str,
        writer: PayloadWriter | None,
        limits: EncoderSaveLimits,
        recorder: MemoryRecorder,
        *,
        drain_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            copies: of the device of vLLM's encoder cache.
            dtype: the dtype of outputs that can be loaded again.
            writer: on the same clock; ``close`` closes it. None if this rank saves nothing.
        """
        self.copies = copies
        self._dtype, self._writer, self._limits = dtype, writer, limits
        self._recorder, self._drain_s, self._clock = recorder, drain_s, clock
        self._lock = Lock()
        self._held_bytes = 0
        self._closed = False
        self._pid = getpid()

    def load(self, plan: EncoderPlan, cache: EncoderCache) -> None:
        """Add the plan's outputs to ``cache``, except those that it already has."""
        for load in plan.loads:
            if load.identifier not in cache:
                cache[load.identifier] = self._tensor(load)

    def save(self, plan: EncoderPlan, cache: EncoderCache, identifier: str) -> None:
        """Save an output that was just encoded, in the background, if the plan contains it. If too
        many wait, it is dropped and counted."""
        save = plan.saves.get(identifier)
        if save is None or self._writer is None:
            return
        encoded = cache[identifier].detach()
        dtype = DTYPE_NAMES.get(encoded.dtype)
        limits, nbytes = self._limits, encoded.nbytes
        is_known = encoded.dim() == 2 and encoded.shape[0] == save.embeds and dtype == self._dtype
        if not is_known or nbytes > limits.item_bytes_max:
            self._recorder.count("save_unsupported")
            return
        rows, width = encoded.shape
        output = EncoderOutput(plan.namespace, save.item_hash, rows, width, self._dtype)
        deadline = self._clock() + limits.deadline_s
        saved = SavedOutput(output, encoded, self.copies.mark(), deadline, self)
        with self._lock:
            self._held_bytes += nbytes
            fits = self._held_bytes <= limits.held_bytes_max
        if fits and self._writer.waiting < limits.queue_max:
            self._writer.write(saved)
        else:
            saved.end(WriteOutcome.DROPPED, 0)

    def ended(self, save: SavedOutput, outcome: WriteOutcome, nbytes: int) -> None:
        """A save has ended. Called by any thread."""
        with self._lock:
            self._held_bytes -= save.output.layer.nbytes
        self._recorder.count(_COUNTERS[outcome])
        if outcome is WriteOutcome.ACCEPTED:
            self._recorder.count("save_accepted_bytes", nbytes)

    def take_report(self) -> EncoderReport | None:
        """Return the numbers since the last call."""
        numbers = self._recorder.drain()
        return EncoderReport(numbers) if numbers else None

    def drain_saves(self, seconds: float) -> bool:
        """Wait until nothing is being saved. Returns whether that was so within the bound."""
        return self._writer is None or self._writer.drain(seconds)

    def close(self) -> None:
        """Drain saves within the configured bound, then stop. Idempotent."""
        if self._closed or getpid() != self._pid:
            return  # a forked process has none of its parent's threads
        self._closed = True
        if self._writer is not None:
            self._writer.close(self._drain_s)

    def _tensor(self, load: ItemLoad) -> torch.Tensor:
        """Copy an output into a new tensor. The plan's bytes may belong to the scheduler or to a
        message."""
        output = load.output
        dtype = _DTYPES[output.dtype]
        return self.copies.to_device(load.pages, output.embeds, output.width, dtype)
