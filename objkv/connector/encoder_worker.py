"""The worker's side of the encoder cache: puts in what the plan brings, saves what was encoded.

Every rank puts the same bytes into vLLM's encoder cache, which has a place for them and counts on
them: nothing here may fail but for want of memory. Of the ranks, which all encode the same, one
saves. Source of the call order: vLLM 0.32-0.33, ``v1/worker/ec_connector_model_runner_mixin.py``
and ``v1/worker/gpu/ec_connector.py``.
"""

import logging
from collections.abc import MutableMapping
from os import getpid

import numpy as np
import torch

from objkv.connector.encoder_metadata import EncoderPlan, EncoderReport, ItemLoad, Output
from objkv.connector.encoder_saver import EncoderSaver
from objkv.telemetry import MemoryRecorder
from objkv.transfer.paging import DTYPE_NAMES

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
        output = Output(plan.namespace, save.item_hash, rows, width, self._dtype)
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
