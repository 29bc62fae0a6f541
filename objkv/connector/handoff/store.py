"""Saves and loads hand-offs atomically, and verifies them completely.

The forward thread waits for both, but only until a deadline. A call that takes longer continues on
its own thread, with its memory.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import numpy as np

from objkv.assembly.backends import Backends
from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import (
    Claim,
    Header,
    LayerSpec,
    Provenance,
    encode_in_place,
    frame_pages,
    open_payload,
    payload_bytes_max,
)
from objkv.errors import PayloadError, TransferError, ValueTooLong
from objkv.index.base import Shards
from objkv.keys.identity import Identity, identity_path
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)

R = TypeVar("R")


class Bounded:
    """Runs calls that may hang, one at a time, each on its own thread. For use by one thread."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def call(self, work: Callable[[], R], seconds: float) -> R:
        """Return or raise the result of ``work``. Raises ``TransferError`` if it takes longer than
        ``seconds``, or while an earlier call is in progress. A late result is discarded."""
        if seconds <= 0:
            raise TransferError("no time left")
        if self._thread is not None and self._thread.is_alive():
            raise TransferError("an earlier call to the stores has not ended yet")
        future: Future[R] = Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as exc:  # raised again in the waiting thread
                future.set_exception(exc)
            else:
                future.set_result(result)

        thread = self._thread = Thread(target=run, name="objkv-handoff", daemon=True)
        thread.start()
        try:
            error = future.exception(seconds)
        except TimeoutError:
            raise TransferError(f"the stores took longer than {seconds:.1f} s") from None
        thread.join()
        if error is not None:
            raise error
        return future.result()


class HandoffStore:
    """Payloads of whole prompts, in the same stores as chunks. For the forward thread only."""

    def __init__(
        self,
        backends: Backends,
        cache: ChunkCache,
        identity: Identity,
        *,
        codec: str,
        recorder: Recorder,
    ) -> None:
        """``codec``: a codec of the payload format."""
        self._backends = backends
        self._cache = cache
        self._identity = identity
        self._namespace = identity.namespace()
        self._codec = codec
        self._recorder = recorder
        self._announced = False
        self._bounded = Bounded()

    def save(
        self,
        claim: Claim,
        layers: Sequence[LayerSpec],
        buffer: memoryview,
        provenance: Provenance,
        *,
        seconds: float,
    ) -> None:
        """Encode the pages in ``buffer``, store the payload, and publish it last.

        ``buffer`` is laid out for ``encode_in_place``, and the caller no longer touches it. No
        lease is taken: two engines may save the same prompt, and the one without the lease would
        report it as stored too early. Raises ``ObjkvError``.
        """

        def work() -> None:
            if not self._announced:
                self._backends.bulk.put_if_absent(
                    identity_path(self._namespace), self._identity.canonical()
                )
                self._announced = True
            payload, header = encode_in_place(
                claim,
                layers,
                buffer,
                codec=self._codec,
                provenance=provenance,
                seal=self._cache.seal,
            )
            self._cache.save(claim, payload, header)
            self._recorder.count("saves")
            self._recorder.count("save_bytes", header.nbytes)

        if not self._cache.begin_save(claim.key):
            return  # this process has just stored it
        try:
            self._bounded.call(work, seconds)
        finally:
            self._cache.end_save(claim.key)

    def load(
        self, claim: Claim, layers: tuple[LayerSpec, ...], *, seconds: float
    ) -> list[memoryview] | None:
        """Return the verified pages of every layer. If the payload is missing or corrupt, return
        None and remove its record. Raises ``ObjkvError``."""
        return self._bounded.call(lambda: self._load(claim, layers), seconds)

    def _load(self, claim: Claim, layers: tuple[LayerSpec, ...]) -> list[memoryview] | None:
        key = claim.key
        found = self._backends.index.find(key.namespace, [key.prefix_hash], [key.field])[0]
        record = None if found is None else found.get(key.field)
        if found is None or record is None:
            return None
        if record.nbytes > payload_bytes_max(layers, tokens=claim.token_end):
            self._refuse(claim, found, "record is longer than the payload can be")
            return None
        buffer = np.empty(record.nbytes, np.uint8).data
        try:
            nbytes = self._cache.get_into(key, buffer, hot=record.hot)
            if nbytes is None:
                self._recorder.count("load_ghosts")
                self._cache.reject(key, found, corrupt=False)
                return None
            payload = buffer[:nbytes]
            header = open_payload(payload, claim, layers, seal=self._cache.seal)
            pages = [self._pages(header, index, payload) for index in range(len(layers))]
        except (PayloadError, ValueTooLong) as exc:
            self._refuse(claim, found, str(exc))
            return None
        self._recorder.count("loads")
        self._recorder.count("load_bytes", nbytes)
        return pages

    def _pages(self, header: Header, index: int, payload: memoryview) -> memoryview:
        if header.frames.codecs[index] == "none":
            return frame_pages(header, index, payload, None)
        scratch = np.empty(header.frames.layers[index].nbytes, np.uint8).data
        return frame_pages(header, index, payload, scratch)

    def _refuse(self, claim: Claim, records: Shards, reason: str) -> None:
        logger.warning("hand-off refused, recomputing key=%s reason=%s", claim.key.path(), reason)
        self._recorder.count("load_corrupt")
        self._cache.reject(claim.key, records, corrupt=True)
