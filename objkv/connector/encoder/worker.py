"""The worker's side of the encoder cache. vLLM relies on a plan's outputs, so a load fails only if
memory is short. All ranks encode the same outputs, and one saves them. Source of the call order:
vLLM 0.32-0.33, ``ec_connector_model_runner_mixin.py`` and ``gpu/ec_connector.py`` in
``v1/worker``."""

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from os import getpid
from threading import Lock
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch

from objkv.agent.payloads import PayloadTransfer, PayloadWriter, WriteOutcome
from objkv.config import Config
from objkv.connector.encoder.items import EncoderPlan, EncoderReport, Pages
from objkv.errors import TransferError
from objkv.telemetry import MemoryRecorder
from objkv.transfer.devices import driver_of
from objkv.transfer.paging import DTYPE_NAMES

logger = logging.getLogger(__name__)

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
EncoderCache = MutableMapping[str, torch.Tensor]
"""vLLM's outputs by identifier: ``[embeds, width]`` on the worker's device, never written again."""
_COPY_S_MAX = 30.0
"""How long a save waits for its copy, which waits for the kernels that compute the output."""
_POLL_S = 1e-3


class OutputCopies:
    """Copies outputs between host memory and a device, which may be the host. ``to_device`` and
    ``mark`` are for the forward thread, which nothing here blocks: outputs are copied from
    page-locked memory, on the compute stream, so that the model reads them afterwards. The thread
    that saves copies on a stream of its own. PyTorch records which streams use a piece of its
    page-locked memory, and reuses it only when they have passed."""

    def __init__(self, device: torch.device) -> None:
        """Raises ``ConfigError`` for an unsupported device."""
        self._device, self._on_host, self._warned = device, device.type == "cpu", False
        if not self._on_host:
            self._driver = driver_of(device)
            self._api = torch.get_device_module(device)
            # One for all saves: PyTorch deals out a few streams in turn, and one per save would
            # soon be the stream that another part of objkv loads on.
            self.stream = self._api.Stream(device)

    def adopt_thread(self) -> None:
        """Select the device for the calling thread, which calls it once, before ``to_host``. A new
        thread is on device 0, and would open a context there for every other rank."""
        if not self._on_host:
            self._api.set_device(self._device)

    def to_device(self, pages: Pages, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of ``pages``, ``[rows, width]``, for work of the current compute
        stream. Does not wait for the device. ``pages`` may change when this returns."""
        memory = self._staged(pages.nbytes)
        np.copyto(memory.numpy(), pages)
        staged = memory.view(dtype).view(rows, width)
        return staged.to(self._device, non_blocking=memory.is_pinned())

    def mark(self) -> Any:
        """Return a mark after all work submitted to the current compute stream so far."""
        if self._on_host:
            return None
        event = self._driver.event()
        event.record(self._api.current_stream(self._device))
        return event

    def to_host(self, tensor: torch.Tensor, computed: Any, pages: memoryview) -> None:
        """Copy the bytes of ``tensor`` to ``pages``, which has as many. Waits for the device's work
        before ``computed``, a mark. Raises ``TransferError`` if that takes too long."""
        memory = _bytes_of(tensor) if self._on_host else self._copied(tensor, computed)
        np.copyto(np.frombuffer(pages, np.uint8), memory.numpy())  # without the GIL

    def _copied(self, tensor: torch.Tensor, computed: Any) -> torch.Tensor:
        memory = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        with self._api.stream(self.stream):
            computed.wait(self.stream)
            memory.copy_(_bytes_of(tensor), non_blocking=True)
            copied = self._driver.event()
            copied.record(self.stream)
        end = monotonic() + _COPY_S_MAX
        while not copied.query():
            if monotonic() >= end:  # the copy may go on: nothing else gets its memory before
                raise TransferError(f"the device copied no output within {_COPY_S_MAX:g} s")
            sleep(_POLL_S)
        return memory

    def _staged(self, nbytes: int) -> torch.Tensor:
        """Return memory to copy from, page-locked if the system has enough."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not self._on_host)
        except RuntimeError as exc:  # vLLM relies on the output, so it is copied in any case
            if not self._warned:
                logger.warning("encoder outputs block the model, page-locking failed error=%s", exc)
            self._warned = True
            return torch.empty(nbytes, dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as ``[n]`` uint8, without a copy if it is C-contiguous."""
    return tensor.contiguous().view(torch.uint8).view(-1)


@dataclass(slots=True, eq=False)
class SavedOutput(PayloadTransfer):
    """An encoder output that is kept alive until it is saved."""

    tensor: torch.Tensor
    """``[embeds, width]``. It is never written again, so it can be read at any time."""
    computed: Any
    """A mark of ``OutputCopies`` after which the tensor contains the output."""
    side: "EncoderWorkerSide"

    def write_pages(self, pages: memoryview) -> None:
        self.side.copies.to_host(self.tensor, self.computed, pages)

    def end(self, outcome: WriteOutcome, nbytes: int) -> None:
        self.side.ended(self, outcome, nbytes)


class EncoderWorkerSide:
    """The worker's half. For the forward thread, but for ``ended``. Waits only in ``close``."""

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
        """``writer``: on the same clock; ``close`` closes it. None if this rank saves nothing.
        ``item_bytes_max``: for one output. ``held_bytes_max``: for all that wait to be saved."""
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
        mark, layers = self.copies.mark(), (output.layer,)
        saved = SavedOutput(output.claim, layers, deadline, encoded, mark, self)
        with self._lock:
            self._held_bytes += encoded.nbytes
            fits = self._held_bytes <= self._held_bytes_max
        if fits:
            self.writer.write(saved)
        else:
            saved.end(WriteOutcome.DROPPED, 0)

    def ended(self, save: SavedOutput, outcome: WriteOutcome, nbytes: int) -> None:
        """A save has ended. Called by any thread."""
        with self._lock:
            self._held_bytes -= save.tensor.nbytes
        has_copy = outcome in (WriteOutcome.ACCEPTED, WriteOutcome.HELD_BACK)
        self._recorder.count("saves_accepted" if has_copy else outcome.value)
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
