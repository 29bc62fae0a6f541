"""Saves encoder outputs in the background: what the forward thread does is to remember a tensor.

An output is never written again once it is in vLLM's encoder cache, so it may be read whenever
there is time; until then it is kept alive, which is what the bound in bytes is for. A full queue is
a drop: counted, never waited for.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic, time
from typing import Any

import torch

from objkv.cache.tiered import ChunkCache, SaveOutcome
from objkv.codec.payload import Provenance, encode, open_payload
from objkv.connector.encoder_metadata import Output
from objkv.errors import ObjkvError
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)

_JOIN_S = 1.0
_THREADS = 2


@dataclass(frozen=True, slots=True)
class EncoderSaveLimits:
    """Bounds of the saver, and what it writes into payloads."""

    queue_max: int
    held_bytes_max: int
    """Of tensors kept alive until they are saved."""
    item_bytes_max: int
    deadline_s: float
    """An output that waited longer is dropped."""
    codec: str
    """An id of the format."""
    writer: str


@dataclass(frozen=True, slots=True)
class _Save:
    output: Output
    tensor: torch.Tensor
    encoded: Any
    """CUDA event after which the tensor holds the output; None on the host."""
    deadline: float


class EncoderSaver:
    """``submit`` belongs to the forward thread."""

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
        self._trouble = Trouble(logger, "encoder saves")
        self._changed = Condition()
        self._queue: deque[_Save] = deque()
        self._busy = 0
        self._held_bytes = 0
        self._closed = False
        self._threads = [
            Thread(target=self._work, name=f"objkv-encoder-save-{i}", daemon=True)
            for i in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, output: Output, tensor: torch.Tensor, *, replaces: bool = False) -> None:
        """Save ``tensor``, ``[embeds, width]``, which nobody writes any more. Never waits."""
        nbytes, limits = output.layer.nbytes, self._limits
        if nbytes > limits.item_bytes_max:
            self._recorder.count("save_unsupported")
            return
        if replaces:  # so that it is put over the payload that was found corrupt
            self._cache.reject(output.claim.key, {}, corrupt=True)
        if not self._cache.begin_save(output.claim.key):
            self._recorder.count("save_repeats")
            return
        event = None
        if tensor.is_cuda:
            event = torch.cuda.Event()
            event.record()
        save = _Save(output, tensor, event, self._clock() + limits.deadline_s)
        with self._changed:
            full = len(self._queue) >= limits.queue_max
            if not (self._closed or full or self._held_bytes + nbytes > limits.held_bytes_max):
                self._queue.append(save)
                self._held_bytes += nbytes
                self._changed.notify()
                return
        self._drop(save)

    def drain(self, deadline_s: float) -> bool:
        """Wait until all saves are through, at most so long; True if they are."""
        end = self._clock() + deadline_s
        with self._changed:
            while self._queue or self._busy:
                left = end - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, drain_s: float) -> None:
        """Drain within the bound, then stop; what is left is dropped."""
        if not self.drain(drain_s):
            logger.warning("encoder outputs dropped at shutdown count=%d", len(self._queue))
        with self._changed:
            self._closed = True
            left, self._queue = self._queue, deque()
            self._changed.notify_all()
        for save in left:
            self._drop(save)
        end = monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def __repr__(self) -> str:
        return f"<EncoderSaver {len(self._queue)} waiting, {self._busy} under way>"

    def _drop(self, save: _Save) -> None:
        self._cache.end_save(save.output.claim.key)
        self._recorder.count("save_drops")

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                save = self._queue.popleft()
                self._busy += 1
            try:
                self._save(save)
                self._trouble.worked()
            except ObjkvError as exc:
                self._recorder.count("save_errors")
                self._trouble.failed(exc)
            except Exception:  # a dead thread would keep tensors for ever
                self._recorder.count("save_errors")
                logger.exception("save failed unexpectedly")
            finally:
                self._cache.end_save(save.output.claim.key)
                with self._changed:
                    self._busy -= 1
                    self._held_bytes -= save.output.layer.nbytes
                    self._changed.notify_all()

    def _save(self, save: _Save) -> None:
        claim, key = save.output.claim, save.output.claim.key
        if self._clock() >= save.deadline:
            self._recorder.count("save_drops")
            return
        if not self._cache.take_lease(key):
            self._recorder.count("save_leased_elsewhere")
            return
        started = self._clock()
        try:
            layers = (save.output.layer,)
            payload = encode(
                claim,
                layers,
                [_bytes_of(save)],
                codec=self._limits.codec,
                provenance=Provenance(
                    token_digest=hashlib.sha256(key.prefix_hash).hexdigest(),
                    writer=self._limits.writer,
                    created_s=int(time()),
                ),
            )
            outcome = self._cache.save(claim, payload, open_payload(payload, claim, layers))
        finally:
            self._cache.release_lease(key)
        self._recorder.observe("save_seconds", self._clock() - started)
        if outcome is SaveOutcome.SAVED:
            self._recorder.count("saves")
            self._recorder.count("save_bytes", len(payload))
        else:
            self._recorder.count("save_existed")


def _bytes_of(save: _Save) -> memoryview:
    """The output's bytes in host memory, contiguous."""
    tensor = save.tensor
    if save.encoded is not None:
        # On a stream of its own: computing neither waits for this copy nor is waited for further.
        stream = torch.cuda.Stream(tensor.device)
        stream.wait_event(save.encoded)
        with torch.cuda.stream(stream):
            tensor = tensor.cpu()
    flat: memoryview = tensor.contiguous().view(torch.uint8).view(-1).numpy().data
    return flat
