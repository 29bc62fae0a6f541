"""The parts of a secondary tier below vLLM's interface: agent, lookups, jobs, vLLM's memory."""

from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import cast

from objkv.agent.messages import PayloadRequest
from objkv.agent.payloads import PayloadReader, PayloadWriter, WriteOutcome
from objkv.assembly.link import AgentLink, Replica
from objkv.background import Steps
from objkv.cache.lookup import LOOKUP_TTL_S, LookupLimits
from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.connector.tier.jobs import Job, RowLoad, Rows, RowSave, TierJobs, chunk_key
from objkv.connector.tier.lookup import TierLookups
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
        rows: Rows,
        recorder: Recorder,
        *,
        queue_max: int,
    ) -> None:
        """
        Args:
            rows: only jobs touch vLLM's memory, and ``close`` releases it.
            queue_max: chunks that may wait per direction.
        """
        self._config, self._rows, self._recorder = config, rows, recorder
        self._kill_at: float | None = None
        link = self._link = AgentLink(config, replica)
        nbytes_max = payload_bytes_max((rows.layer,))
        self._writer = PayloadWriter(link.connect, nbytes_max, "chunks", writer=writer_name(self))
        self._reader = PayloadReader(link.connect, "chunks")
        link.await_agent()
        # These have the verbs that replicas use; the rest is for operators.
        self.documents = cast("WriteStore", link.calls)
        self._index = link.calls
        limits = LookupLimits(config.lookup_deadline_ms / 1000, age_max_s=LOOKUP_TTL_S)
        # A folder that is its own index ends its answers early.
        is_folder = config.index_url == "bulk:"
        self.lookups = TierLookups(self._index, recorder, limits, ends_early=is_folder)
        load_s, save_s = config.load_deadline_ms / 1000, config.save_deadline_ms / 1000
        self.loads = TierJobs("load", rows, recorder, queue_max=queue_max, deadline_s=load_s)
        self.saves = TierJobs("save", rows, recorder, queue_max=queue_max, deadline_s=save_s)

    def load(
        self, job_id: int, namespace: str | None, keys: Sequence[bytes], rows: Sequence[int]
    ) -> None:
        """Load chunks that were found into rows."""
        loads = []
        job, taken = self.loads.begin(job_id, keys, refuse=namespace is None)
        for key, row in zip(taken, rows, strict=False):
            record = self.lookups.record(key)
            if namespace is None or record is None:  # not found, or not looked up
                self.loads.settle(job, key, done=False)
                continue
            wanted = PayloadRequest(self._rows.claim(namespace, key), record)
            loads.append(RowLoad(self.loads, job, key, row, wanted))
        self._reader.read(loads)

    def save(
        self, job_id: int, namespace: str | None, keys: Sequence[bytes], rows: Sequence[int]
    ) -> None:
        """Save rows that are not stored. A reader saves nothing."""
        job, taken = self.saves.begin(job_id, keys, refuse=namespace is None)
        if namespace is None or self._config.role == "reader":
            for key in taken:
                self.saves.settle(job, key, done=True)
            return
        saves = [
            RowSave(self.saves, job, key, row, self._rows.claim(namespace, key))
            for key, row in zip(taken, rows, strict=False)
        ]
        if not self.lookups.submit(partial(self._save_new, namespace, saves)):
            self._save(saves)

    def loaded(self, namespace: str | None, job: Job) -> None:
        """A job has ended. Extends the life of the records of its chunks."""
        self.lookups.deny(job.failed)  # later lookups must not wait for the same load again
        if namespace is not None and job.done:
            hashes = [chunk_key(namespace, key).prefix_hash for key in job.done]
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
        self._rows.memory.release()
        self.lookups.close()
        self._reader.close()
        self._writer.close(0.0)
        self._link.calls.close()

    def _save_new(self, namespace: str, saves: Sequence[RowSave]) -> Steps[None]:
        """Save the chunks that are not stored already. On the lookup thread."""
        names = [one.claim.key for one in saves]
        fields = sorted({name.field for name in names})
        try:
            find = self._index.find(namespace, [name.prefix_hash for name in names], fields)
            found = yield from find
        except StoreError:
            self._recorder.count("tier_lookup_errors")
            found = [None] * len(names)
        new = []
        for one, shards in zip(saves, found, strict=True):
            if shards is None or one.claim.key.field not in shards:
                new.append(one)
            else:
                one.end(WriteOutcome.EXISTED, 0)
        self._save(new)

    def _save(self, saves: Sequence[RowSave]) -> None:
        for one in saves:
            self._writer.write(one)
