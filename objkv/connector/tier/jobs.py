"""Jobs and lookups of a secondary tier. A job has many rows of vLLM's memory, which the node's
agent loads or saves. A row contains one chunk's bytes of all ranks and layers, in vLLM's own order.
It is the single frame of a payload, which is named by vLLM's key and verified before the copy.

vLLM's memory is touched only under ``TierJobs.copying``, and not after the job has ended. A job can
therefore be ended at once, whatever its rows wait for.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Lock
from time import monotonic

import numpy as np
from vllm.v1.kv_offload.base import LookupResult

from objkv.agent.client import CALL_S
from objkv.agent.payloads import PayloadTransfer, ReadOutcome, WriteOutcome
from objkv.background import Steps, StepThread, in_steps
from objkv.cache.lookup import FindIndex, LookupLimits
from objkv.codec.values import DTYPE_BYTES, LAYER_BYTES_MAX, Claim, LayerSpec
from objkv.errors import ConfigError, StoreError, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
_QUEUE_MAX = 4096
"""Rows that may wait to be loaded, and as many to be saved. They wait in vLLM's memory."""
_GROUP_BYTES = 4
_NO_PARENT = bytes(PREFIX_HASH_BYTES)
_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32"}
_SAVES = {
    WriteOutcome.ACCEPTED: "saves",
    WriteOutcome.HELD_BACK: "saves",
    WriteOutcome.DROPPED: "save_deadlines",
}
"""Counters of a tier that have other names than their outcomes."""
_STORED = frozenset((WriteOutcome.ACCEPTED, WriteOutcome.EXISTED))
_SETTLED = _STORED | {WriteOutcome.HELD_BACK, WriteOutcome.REPEATED, WriteOutcome.OVER_QUOTA}
"""Outcomes with which a job does not fail."""


def chunk_key(namespace: str, key: bytes) -> ChunkKey:
    """Return objkv's key for vLLM's ``OffloadKey``, which is a block hash and a 4-byte group."""
    block_hash, group = key[:-_GROUP_BYTES], key[-_GROUP_BYTES:]
    digest = hashlib.sha256(block_hash).digest()[:PREFIX_HASH_BYTES]
    return ChunkKey(namespace, digest, int.from_bytes(group, "big"))


@dataclass(frozen=True, slots=True)
class Rows:
    """vLLM's memory. No view of it may outlive a copy, otherwise it cannot be unmapped."""

    layer: LayerSpec
    """The form of every row."""
    tokens: int
    """Tokens per chunk."""
    memory: memoryview
    """``[rows * layer.nbytes]`` uint8."""

    def view(self, row: int) -> np.ndarray:
        """Return a view of a row, uint8."""
        size = self.layer.nbytes
        return np.frombuffer(self.memory, np.uint8, size, row * size)


def row_layer(row_bytes: int, kv_dtype: str) -> LayerSpec:
    """Return the form of a row. Raises ``ConfigError`` if it is too large for a payload's frame."""
    if row_bytes > LAYER_BYTES_MAX:
        raise ConfigError(
            f"a chunk has {row_bytes} bytes, but objkv stores at most {LAYER_BYTES_MAX} in one "
            "payload: lower block_size or blocks_per_chunk"
        )
    dtype = _SAFETENSORS.get(kv_dtype, "U8")
    if row_bytes % DTYPE_BYTES[dtype]:
        dtype = "U8"
    return LayerSpec("row", dtype, (1, 1, 1, row_bytes // DTYPE_BYTES[dtype]))


@dataclass(slots=True, eq=False)
class Job:
    """A job, and its outcome after it has ended."""

    job_id: int
    keys: Sequence[bytes]
    started: float
    deadline: float
    waiting: int
    """Rows that have not ended."""
    done: list[bytes] = field(default_factory=list)
    noted: list[bytes] = field(default_factory=list)
    """Chunks that ended with a note."""
    open: bool = True
    seconds: float = 0.0

    @property
    def failed(self) -> list[bytes]:
        """Chunks that are not done."""
        done = set(self.done)
        return [key for key in self.keys if key not in done]


class TierJobs:
    """The jobs of one direction. The scheduler's thread calls all methods but ``end``; threads that
    copy also settle rows, and use ``copying``, ``rows`` and ``recorder``."""

    def __init__(
        self,
        name: str,
        rows: Rows,
        recorder: Recorder,
        *,
        deadline_s: float,
        queue_max: int = _QUEUE_MAX,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``name``: ``load`` or ``save``, for the counters. ``deadline_s``: the remaining rows of a
        job that takes longer fail. ``queue_max``: rows that may wait; further ones fail."""
        self.rows, self.recorder = rows, recorder
        self.name, self._clock = name, clock
        self._queue_max, self._deadline_s = queue_max, deadline_s
        self.copying = Lock()
        """Held while a row is copied."""
        self.changed = Condition()
        """Guards the jobs, and is notified when one ends."""
        self._jobs: dict[int, Job] = {}
        self._ended: list[Job] = []
        self._closed = False

    def begin(
        self, job_id: int, namespace: str | None, keys: Sequence[bytes], rows: Iterable[int]
    ) -> list["JobRow"]:
        """Begin a job. Returns its first chunks, each of which must end. Those for which there is
        no room fail, without a namespace all of them."""
        now = self._clock()
        with self.changed:
            is_refused = self._closed or namespace is None
            room = 0 if is_refused else max(0, self._queue_max - self._waiting())
            taken = keys[:room]
            if refused := len(keys) - len(taken):
                self.recorder.count(f"{self.name}_refused", refused)
            job = Job(job_id, keys, now, now + self._deadline_s, len(taken))
            self._jobs[job_id] = job
            if not taken:
                self.end(job)
        if namespace is None:
            return []
        # vLLM's key has neither the chunk's parent nor its position. Its hash depends on both.
        claims = (Claim(chunk_key(namespace, k), _NO_PARENT, 0, self.rows.tokens) for k in taken)
        layers = (self.rows.layer,)
        return [
            JobRow(claim, layers, job.deadline, self, job, key, int(row))
            for claim, key, row in zip(claims, taken, rows, strict=False)
        ]

    def take_finished(self) -> list[Job]:
        """Return the jobs that ended since the last call, including those past their deadline."""
        now = self._clock()
        with self.changed:
            late = [job for job in self._jobs.values() if job.deadline <= now]
            for job in late:
                self.recorder.count(f"{self.name}_deadlines", job.waiting)
            self._abort(late)
            ended, self._ended = self._ended, []
            return ended

    def give_up(self) -> None:
        """End all jobs now. Afterwards no thread touches vLLM's memory for any of them."""
        with self.changed:
            self._abort(list(self._jobs.values()))

    def close(self, drain_s: float) -> None:
        """Let the jobs end within ``drain_s``, and refuse others. Idempotent."""
        with self.changed:
            self.changed.wait_for(lambda: not self._jobs, drain_s)
            self._closed = True
            if waiting := self._waiting():
                logger.warning("tier given up at shutdown what=%ss chunks=%d", self.name, waiting)
        self.give_up()

    def _waiting(self) -> int:
        return sum(job.waiting for job in self._jobs.values())

    def _abort(self, jobs: Sequence[Job]) -> None:
        """End jobs, with the lock held. Waits for a copy in progress, within memory only."""
        if jobs:
            with self.copying:
                for job in jobs:
                    job.open = False
        for job in jobs:
            self.end(job)

    def end(self, job: Job) -> None:
        """End a job, with the lock held."""
        job.open, job.seconds = False, self._clock() - job.started
        self._ended.append(self._jobs.pop(job.job_id))
        self.changed.notify_all()


@dataclass(slots=True, eq=False)
class JobRow(PayloadTransfer):
    """One chunk of a job, and its row. Thread-safe."""

    jobs: TierJobs
    job: Job
    key: bytes
    row: int

    @property
    def is_needed(self) -> bool:
        return self.job.open

    def take_pages(self, pages: Sequence[memoryview]) -> None:
        with self.jobs.copying:
            if self.job.open:
                np.copyto(self.jobs.rows.view(self.row), np.frombuffer(pages[0], np.uint8))

    def write_pages(self, pages: memoryview) -> None:
        with self.jobs.copying:
            if not self.job.open:
                raise TransferError("a job ended while it was saved")
            np.copyto(np.frombuffer(pages, np.uint8), self.jobs.rows.view(self.row))

    def settle(self, *, done: bool, noted: bool = False) -> None:
        """It has ended. Thread-safe. No effect after its job has."""
        job = self.job
        with self.jobs.changed:
            if not job.open:
                return
            if done:
                job.done.append(self.key)
            if noted:
                job.noted.append(self.key)
            job.waiting -= 1
            if not job.waiting:
                self.jobs.end(job)

    def end(self, outcome: ReadOutcome | WriteOutcome, nbytes: int) -> None:
        """Notes payloads that were missing or corrupt, and those that the agent saves."""
        counter: str = outcome.value
        if isinstance(outcome, ReadOutcome):
            is_done = outcome is ReadOutcome.READ
            is_noted = outcome in (ReadOutcome.MISSING, ReadOutcome.CORRUPT)
        else:
            counter = _SAVES.get(outcome, counter)
            is_done, is_noted = outcome in _SETTLED, outcome in _STORED
        if self.is_needed:
            self.jobs.recorder.count(counter)
            self.jobs.recorder.count(f"{self.jobs.name}_bytes", nbytes)
        self.settle(done=is_done, noted=is_noted)


@dataclass(slots=True, eq=False)
class _Verdict:
    key: ChunkKey
    deadline: float
    is_stored: bool | None = None
    """None until the background thread or the scheduler's thread answers."""


class TierLookups:
    """Lookups by key. For the scheduler's thread only. Never waits. vLLM queries one key after
    another in each step until it gets a miss. New keys are looked up when the step is planned, with
    one question for each request and group. A late, failed or refused one is a miss."""

    def __init__(
        self,
        index: FindIndex,
        recorder: Recorder,
        limits: LookupLimits,
        *,
        ends_early: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``ends_early``: whether the index ends its answer to several keys at the first missing
        one. They are looked up one by one then: vLLM reads a window from its end."""
        self._index, self._recorder, self._limits, self._clock = index, recorder, limits, clock
        self._ends_early = ends_early
        self._thread = StepThread(
            "objkv-tier-lookup", answer_s=CALL_S, queue_max=limits.queue_max, failed=_note_failure
        )
        self._asked: dict[str, dict[bytes, _Verdict]] = {}
        """By request and key. What several requests ask for, the agent answers from memory."""
        self._new: dict[object, list[_Verdict]] = {}
        """Keys to look up, by request, and by group or one by one."""

    def ask(self, request_id: str, namespace: str, key: bytes) -> LookupResult:
        """Return whether the chunk is stored, or RETRY while that is unknown."""
        verdicts = self._asked.setdefault(request_id, {})
        verdict = verdicts.get(key)
        if verdict is None:
            deadline = self._clock() + self._limits.deadline_s
            verdict = verdicts[key] = _Verdict(chunk_key(namespace, key), deadline)
            part = key if self._ends_early else verdict.key.group
            self._new.setdefault((request_id, part), []).append(verdict)
        if verdict.is_stored is None:
            if self._clock() < verdict.deadline:
                return LookupResult.RETRY
            self._recorder.count("lookup_deadlines")
            verdict.is_stored = False
        return LookupResult.HIT if verdict.is_stored else LookupResult.MISS

    def flush(self) -> None:
        """Look up the new keys of the planned step."""
        questions, self._new = list(self._new.values()), {}
        if questions and not self.submit(partial(self._find, questions)):
            for verdicts in questions:
                self._recorder.count("lookup_refused", len(verdicts))
                self._miss(verdicts)

    def has_found(self, request_id: str, key: bytes) -> bool:
        """Whether a request's lookup of a chunk found that it is stored."""
        verdict = self._asked.get(request_id, {}).get(key)
        return verdict is not None and bool(verdict.is_stored)

    def deny(self, keys: Sequence[bytes]) -> None:
        """Make lookups of these keys by present requests miss: their load failed."""
        for verdicts in self._asked.values():
            self._miss([verdicts[key] for key in keys if key in verdicts])

    def forget(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._asked.pop(request_id, None)

    def clear(self) -> None:
        """Forget all answers."""
        self._asked.clear()
        self._new.clear()

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        """See ``StepThread.run``. A ``StoreError`` of the job is dropped."""
        return self._thread.run(job)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close(0.0)

    def _miss(self, verdicts: Iterable[_Verdict]) -> None:
        for verdict in verdicts:
            verdict.is_stored = False

    def _find(self, questions: Sequence[Sequence[_Verdict]]) -> Steps[None]:
        """Look up keys, those of one namespace and group in one call."""
        for verdicts in questions:
            key = verdicts[0].key
            left = [one for one in verdicts if one.is_stored is None]  # the others were late
            hashes = [one.key.prefix_hash for one in left]
            try:
                found = yield from in_steps(self._index.find(key.namespace, hashes, (key.field,)))
            except StoreError:
                self._recorder.count("lookup_errors")
                self._miss(left)
                continue
            for verdict, shards in zip(left, found, strict=True):
                if verdict.is_stored is None:  # else it was late
                    verdict.is_stored = shards is not None and key.field in shards


def _note_failure(error: Exception) -> None:
    if not isinstance(error, StoreError):
        logger.error("tier job failed unexpectedly", exc_info=error)
