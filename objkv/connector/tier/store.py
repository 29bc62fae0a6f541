"""The parts of a secondary tier below vLLM's interface: agent, lookups, jobs, vLLM's memory."""

from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import cast

from objkv.agent.messages import PayloadRequest
from objkv.agent.payloads import PayloadReader, PayloadWriter
from objkv.assembly.link import AgentLink, Replica
from objkv.background import Steps
from objkv.cache.lookup import LookupLimits
from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.connector.tier.jobs import JobChunk, TierJobs
from objkv.connector.tier.lookup import TierLookups
from objkv.connector.tier.rows import RowForm, RowLoad, RowMemory, RowSave, chunk_key
from objkv.connector.wiring import writer_name
from objkv.errors import StoreError
from objkv.stores.base import WriteStore
from objkv.telemetry import Recorder

_MARGIN_S = 0.5
"""How long before vLLM kills the process saves are dropped and logged."""


class TierStore:
    """Owns a tier's way to the agent, its lookups and its jobs. For the scheduler's thread only.
    Only ``close`` waits, and the constructor for an agent. It raises ``ConfigError``."""

    def __init__(
        self,
        config: Config,
        replica: Replica,
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
        self._config, self._form, self._recorder = config, form, recorder
        self._memory = RowMemory(form, memory)
        self._kill_at: float | None = None
        link = self._link = AgentLink(config, replica)
        nbytes_max = payload_bytes_max(form.layers)
        self._writer = PayloadWriter(link.connect, nbytes_max, "chunks", writer=writer_name(self))
        self._reader = PayloadReader(link.connect, "chunks")
        link.await_agent()
        # These have the verbs that replicas use; the rest is for operators.
        self.documents = cast("WriteStore", link.calls)
        self._index = link.calls
        lookup_s, age_max_s = config.lookup_deadline_ms / 1000, config.lookup_ttl_ms / 1000
        limits = LookupLimits(lookup_s, config.lookup_queue_max, age_max_s=age_max_s)
        # A folder that is its own index ends its answers early.
        is_folder = config.index_url == "bulk:"
        self.lookups = TierLookups(self._index, recorder, limits, ends_early=is_folder)
        load_s, save_s = config.load_deadline_ms / 1000, config.save_deadline_ms / 1000
        self.loads = TierJobs("load", recorder, queue_max=queue_max, deadline_s=load_s)
        self.saves = TierJobs("save", recorder, queue_max=queue_max, deadline_s=save_s)

    def load(
        self, job_id: int, namespace: str | None, keys: Sequence[bytes], rows: Sequence[int]
    ) -> None:
        """Load chunks that were found into rows."""
        loads = []
        for chunk in self.loads.submit(job_id, keys, rows, refuse=namespace is None):
            record = self.lookups.record(chunk.key)
            if namespace is None or record is None:  # not found, or not looked up
                chunk.settle(done=False)
                continue
            wanted = PayloadRequest(self._form.claim(namespace, chunk.key), record)
            loads.append(RowLoad(chunk, wanted, self._memory, self._recorder))
        self._reader.read(loads)

    def save(
        self, job_id: int, namespace: str | None, keys: Sequence[bytes], rows: Sequence[int]
    ) -> None:
        """Save rows that are not stored. A reader saves nothing."""
        chunks = self.saves.submit(job_id, keys, rows, refuse=namespace is None)
        if namespace is None or self._config.role == "reader":
            for chunk in chunks:
                chunk.settle(done=True)
        elif not self.lookups.submit(partial(self._save_new, namespace, chunks)):
            self._save(namespace, chunks)

    def touch(self, namespace: str, keys: tuple[bytes, ...]) -> None:
        """Extend the life of used chunks' records."""
        hashes = [chunk_key(namespace, key).prefix_hash for key in keys]
        touch = partial(self._index.touch, namespace, hashes, ttl_s=self._config.ttl_s)
        self.lookups.submit(touch)

    def give_up(self) -> None:
        """End all jobs. None of them touches vLLM's memory afterwards."""
        self.loads.give_up()
        self.saves.give_up()
        self._reader.look()

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
        self.loads.close(0.0)
        self.saves.close(self._config.drain_deadline_ms / 1000)
        self._memory.memory.release()
        self.lookups.close()
        self._reader.close()
        self._writer.close(0.0)
        self._link.calls.close()

    def __repr__(self) -> str:
        return f"<TierStore {self.loads!r}, {self.saves!r}, {self.lookups!r}>"

    def _save_new(self, namespace: str, chunks: Sequence[JobChunk]) -> Steps[None]:
        """Save the chunks that are not stored already. On the lookup thread."""
        names = [chunk_key(namespace, chunk.key) for chunk in chunks]
        fields = sorted({name.field for name in names})
        try:
            find = self._index.find(namespace, [name.prefix_hash for name in names], fields)
            found = yield from find
        except StoreError:
            self._recorder.count("tier_lookup_errors")
            found = [None] * len(names)
        new = []
        for chunk, name, shards in zip(chunks, names, found, strict=True):
            if shards is None or name.field not in shards:
                new.append(chunk)
                continue
            self._recorder.count("tier_save_existed")
            chunk.settle(done=True, noted=True)
        self._save(namespace, new)

    def _save(self, namespace: str, chunks: Sequence[JobChunk]) -> None:
        for chunk in chunks:
            claim = self._form.claim(namespace, chunk.key)
            self._writer.write(RowSave(chunk, claim, self._memory, self._recorder))
