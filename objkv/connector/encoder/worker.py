"""The worker's side of the encoder cache: adds the plan's outputs and saves encoded ones.

Every rank adds the same bytes to vLLM's encoder cache, which has a place for them and relies on
them, so a load may fail only if memory is short. All ranks encode the same outputs, and one rank
saves them. Source of the call order: vLLM 0.32-0.33,
``v1/worker/ec_connector_model_runner_mixin.py`` and ``v1/worker/gpu/ec_connector.py``.
"""

import hashlib
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from os import getpid
from threading import Lock
from time import monotonic
from typing import Any

import torch

from objkv.agent.payloads import PayloadWriter, WriteOutcome
from objkv.codec.payload import Claim, LayerSpec
from objkv.config import Config
from objkv.connector.encoder.copies import OutputCopies
from objkv.connector.encoder.items import EncoderOutput, EncoderPlan, EncoderReport
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


@dataclass(frozen=True, slots=True, eq=False)
class SavedOutput:
    """An encoder output that is kept alive until it is saved: a ``PayloadWrite``, which documents
    its methods."""

    output: EncoderOutput
    tensor: torch.Tensor
    """``[embeds, width]``. It is never written again, so it can be read at any time."""
    computed: Any
    """A mark of ``OutputCopies`` after which the tensor contains the output."""
    deadline: float
    side: "EncoderWorkerSide"

    @property
    def claim(self) -> Claim:
        return self.output.claim

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (self.output.layer,)

    @property
    def token_digest(self) -> str:
        """A digest of its name: it has no tokens."""
        return hashlib.sha256(self.output.item_hash).hexdigest()

    def write(self, pages: memoryview) -> None:
        self.side.copies.to_host(self.tensor, self.computed, pages)

    def end(self, outcome: WriteOutcome, nbytes: int) -> None:
        self.side.ended(self, outcome, nbytes)


class EncoderWorkerSide:
    """The worker's half of the encoder cache. The forward thread calls all methods but ``ended``,
    and waits only in ``close``."""

    def __init__(
        self,
        copies: OutputCopies,
        writer: PayloadWriter | None,
        config: Config,
        recorder: MemoryRecorder,
        item_bytes_max: int,
        held_bytes_max: int,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            copies: of the device of vLLM's encoder cache.
            writer: on the same clock; ``close`` closes it. None if this rank saves nothing.
            item_bytes_max: for one output that is saved.
            held_bytes_max: for tensors kept alive until they are saved.
        """
        self.copies, self.writer, self._config = copies, writer, config
        self._recorder, self._clock = recorder, clock
        self._item_bytes_max, self._held_bytes_max = item_bytes_max, held_bytes_max
        self._lock = Lock()
        self._held_bytes = 0
        self._pid = getpid()

    def load(self, plan: EncoderPlan, cache: EncoderCache) -> None:
        """Add the plan's outputs to ``cache``, except those that it already has. They are copied
        into new tensors: the plan's bytes may belong to the scheduler or to a message."""
        for identifier, (output, pages) in plan.loads.items():
            if identifier not in cache:
                dtype = _DTYPES[output.dtype]
                tensor = self.copies.to_device(pages, output.embeds, output.width, dtype)
                cache[identifier] = tensor

    def save(self, plan: EncoderPlan, cache: EncoderCache, identifier: str) -> None:
        """Save an output that was just encoded, in the background, if the plan contains it. If too
        many wait, it is dropped and counted."""
        save = plan.saves.get(identifier)
        if save is None or self.writer is None:
            return
        encoded = cache[identifier].detach()
        dtype = DTYPE_NAMES.get(encoded.dtype)
        is_known = encoded.dim() == 2 and encoded.shape[0] == save.embeds and dtype == save.dtype
        if not is_known or encoded.nbytes > self._item_bytes_max:
            self._recorder.count("save_unsupported")
            return
        output = replace(save, width=encoded.shape[1])
        deadline = self._clock() + self._config.save_deadline_ms / 1000
        saved = SavedOutput(output, encoded, self.copies.mark(), deadline, self)
        with self._lock:
            self._held_bytes += encoded.nbytes
            fits = self._held_bytes <= self._held_bytes_max
        if fits and self.writer.waiting < self._config.save_queue_max:
            self.writer.write(saved)
        else:
            saved.end(WriteOutcome.DROPPED, 0)

    def ended(self, save: SavedOutput, outcome: WriteOutcome, nbytes: int) -> None:
        """A save has ended. Called by any thread."""
        with self._lock:
            self._held_bytes -= save.tensor.nbytes
        self._recorder.count(_COUNTERS[outcome])
        if outcome is WriteOutcome.ACCEPTED:
            self._recorder.count("save_accepted_bytes", nbytes)

    def take_report(self) -> EncoderReport | None:
        """Return the numbers since the last call."""
        numbers = self._recorder.drain()
        return EncoderReport(numbers) if numbers else None

    def close(self) -> None:
        """Drain saves within ``drain_deadline_ms``, then stop. Idempotent."""
        # A forked process has none of its parent's threads.
        if self.writer is not None and getpid() == self._pid:
            self.writer.close(self._config.drain_deadline_ms / 1000)
