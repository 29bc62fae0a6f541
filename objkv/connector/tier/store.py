"""The parts of a secondary tier below vLLM's interface: stores, lookups, jobs, vLLM's memory."""

from time import monotonic

import numpy as np

from objkv.assembly.backends import is_far
from objkv.cache.lookup import LookupLimits
from objkv.config import Config
from objkv.connector.tier.jobs import JobLimits, JobPart, TierJobs
from objkv.connector.tier.lookup import TierLookups
from objkv.connector.tier.rows import RowForm, RowOutcome, Rows, chunk_key
from objkv.connector.wiring import open_cache, open_checked_backends, writer_name
from objkv.errors import StoreError
from objkv.telemetry import Recorder

_SAVES_AT_ONCE = 4
"""Most chunks that one thread saves one after another, after a single lookup for all of them."""
_MARGIN_S = 0.5
"""How long before vLLM kills the process saves are dropped and logged."""


class TierStore:
    """Owns the stores, lookups and jobs of a tier. For the scheduler's thread only. Only ``close``
    waits. The constructor raises ``ConfigError``."""

    def __init__(
        self,
        config: Config,
        form: RowForm,
        memory: memoryview,
        recorder: Recorder,
        *,
        queue_max: int,
    ) -> None:
        """
        Args:
            memory: vLLM's memory, ``[rows * row_bytes]`` uint8. Only jobs touch it, and ``close``
                releases it.
            queue_max: chunks that may wait per direction.
        """
        self._config, self._form = config, form
        self._memory, self._recorder = memory, recorder
        self._kill_at: float | None = None
        self._backends = open_checked_backends(config, recorder)
        self.bulk, self._index = self._backends.bulk, self._backends.index
        writer = writer_name(self)
        self._cache = open_cache(config, self._backends, writer, recorder)
        codec = config.codec if config.codec != "auto" or is_far(config) else "none"
        self._rows = Rows(self._cache, form, recorder, codec=codec, writer=writer)
        lookup_s, age_max_s = config.lookup_deadline_ms / 1000, config.lookup_ttl_ms / 1000
        limits = LookupLimits(lookup_s, config.lookup_queue_max, age_max_s=age_max_s)
        self.lookups = TierLookups(self._index, recorder, limits)
        load_s, save_s = config.load_deadline_ms / 1000, config.save_deadline_ms / 1000
        loads = JobLimits(config.load_threads, queue_max, load_s)
        self.loads = TierJobs("load", self._load, loads, recorder)
        saves = JobLimits(config.save_threads, queue_max, save_s, _SAVES_AT_ONCE)
        self.saves = TierJobs("save", self._save, saves, recorder)

    def touch(self, namespace: str, keys: tuple[bytes, ...]) -> None:
        """Extend the life of used chunks' records."""
        hashes = [chunk_key(namespace, key).prefix_hash for key in keys]
        ttl_s = self._config.ttl_s
        self.lookups.submit(lambda: self._index.touch(namespace, hashes, ttl_s=ttl_s))

    def give_up(self) -> None:
        """End all jobs. None of them touches vLLM's memory afterwards."""
        self.loads.give_up()
        self.saves.give_up()

    def finish(self, grace_s: float, *, idle: bool) -> None:
        """Save queued chunks within ``drain_deadline_ms``, then drop the rest. For each step of an
        engine that vLLM kills ``grace_s`` after the first one. ``idle``: no request is left."""
        now, drain_s = monotonic(), self._config.drain_deadline_ms / 1000
        if self._kill_at is None:
            self._kill_at = now + grace_s
        left_s = max(0.0, self._kill_at - _MARGIN_S - now)
        if idle or left_s <= drain_s:
            self.saves.finish(min(drain_s, left_s))

    def close(self) -> None:
        """Save queued chunks within ``drain_deadline_ms``, then stop. Idempotent."""
        self.loads.give_up()
        self.saves.close(self._config.drain_deadline_ms / 1000)
        self.loads.close(0.0)
        self._memory.release()
        self.lookups.close()
        self._cache.close(0.0)
        self._backends.close()

    def __repr__(self) -> str:
        return f"<TierStore {self.loads!r}, {self.saves!r}, {self.lookups!r}>"

    def _load(self, part: JobPart) -> None:
        """Load a part's chunks. Notes those that are missing or corrupt."""
        for key, row, record in part.entries:

            def copy(pages: np.ndarray, row: int = row) -> bool:
                with part.touch() as allowed:
                    if allowed:
                        self._write(row, pages)
                    return allowed

            if record is None:  # not found, or not looked up
                continue
            outcome = self._rows.load(part.namespace, key, record, copy)
            if outcome is RowOutcome.LOADED:
                part.finish(key)
            elif outcome is RowOutcome.GONE:
                part.note(key)

    def _save(self, part: JobPart) -> None:
        """Save a part's chunks. Notes those that are certainly stored. A reader saves nothing."""
        if self._config.role == "reader":
            for entry in part.entries:
                part.finish(entry.key)
            return
        stored = self._stored(part)
        for key, row, _ in part.entries:

            def copy(pages: np.ndarray, row: int = row) -> bool:
                with part.touch() as allowed:
                    if allowed:
                        self._read(row, pages)
                    return allowed

            outcome = RowOutcome.STORED
            if key not in stored:
                outcome = self._rows.save(part.namespace, key, copy)
            if outcome is RowOutcome.STORED:
                part.note(key)
            if outcome is not RowOutcome.UNWANTED:
                part.finish(key)

    def _stored(self, part: JobPart) -> set[bytes]:
        """Return the keys that are already stored, or none if the lookup fails."""
        keys = {entry.key: chunk_key(part.namespace, entry.key) for entry in part.entries}
        hashes = [key.prefix_hash for key in keys.values()]
        fields = sorted({key.field for key in keys.values()})
        try:
            found = self._index.find(part.namespace, hashes, fields)
        except StoreError:
            self._recorder.count("tier_lookup_errors")
            return set()
        stored = {
            key
            for (key, named), shards in zip(keys.items(), found, strict=True)
            if shards is not None and named.field in shards
        }
        self._recorder.count("tier_save_existed", len(stored))
        return stored

    # No view of vLLM's memory may outlive these two calls, otherwise it cannot be unmapped.

    def _read(self, row: int, pages: np.ndarray) -> None:
        size = self._form.row_bytes
        np.copyto(pages, np.frombuffer(self._memory, np.uint8, size, row * size))

    def _write(self, row: int, pages: np.ndarray) -> None:
        size = self._form.row_bytes
        np.copyto(np.frombuffer(self._memory, np.uint8, size, row * size), pages)
