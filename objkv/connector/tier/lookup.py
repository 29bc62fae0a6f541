"""Lookups of a secondary tier: vLLM queries single keys, and the index is queried in batches.

vLLM queries one key after another in each step until it gets a hit or a miss. The new keys of a
step are looked up in one background call when the step is planned. A late, failed or refused call
is a miss.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import monotonic

from vllm.v1.kv_offload.base import LookupResult

from objkv.background import Steps
from objkv.cache.lookup import LookupLimits, LookupService
from objkv.connector.tier.rows import chunk_key
from objkv.errors import StoreError
from objkv.index.base import ReadIndex, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder

_KEYS_MAX = 1 << 20
"""Most keys to remember, about 300 bytes each. Further ones are misses."""
_BATCH_MAX = 4096
"""Most keys per call, so that several long prompts are looked up in parallel."""


@dataclass(slots=True, eq=False)
class _Verdict:
    key: ChunkKey
    deadline: float
    askers: set[str]
    answered: bool = False
    """Set last, by a background thread or by the scheduler's thread."""
    record: ShardRecord | None = None
    answered_at: float = 0.0


class TierLookups:
    """Lookups by key. For the scheduler's thread only. Never waits."""

    def __init__(
        self,
        index: ReadIndex,
        recorder: Recorder,
        limits: LookupLimits,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``limits.age_max_s``: new requests do not use answers older than this."""
        self._index = index
        self._recorder = recorder
        self._limits = limits
        self._clock = clock
        self._pool = LookupService(index, (), recorder, limits, clock=clock)
        self._known: dict[bytes, _Verdict] = {}
        self._asked: dict[str, set[bytes]] = {}
        self._new: list[_Verdict] = []

    def ask(self, request_id: str, namespace: str, key: bytes) -> LookupResult:
        """Return whether the chunk is stored, or RETRY while that is unknown."""
        verdict = self._known.get(key)
        if verdict is None or self._is_stale(verdict, request_id):
            if verdict is None and len(self._known) >= _KEYS_MAX:
                self._recorder.count("tier_lookup_refused")
                return LookupResult.MISS
            verdict = self._begin(namespace, key, set() if verdict is None else verdict.askers)
        if request_id not in verdict.askers:
            verdict.askers.add(request_id)
            self._asked.setdefault(request_id, set()).add(key)
        if not verdict.answered:
            if self._clock() < verdict.deadline:
                return LookupResult.RETRY
            self._recorder.count("tier_lookup_deadlines")
            self._answer(verdict, None)
        return LookupResult.MISS if verdict.record is None else LookupResult.HIT

    def flush(self) -> None:
        """Look up the new keys of the planned step."""
        new, self._new = self._new, []
        for start in range(0, len(new), _BATCH_MAX):
            batch = new[start : start + _BATCH_MAX]
            if not self._pool.submit(partial(self._find, batch)):
                self._recorder.count("tier_lookup_refused", len(batch))
                for verdict in batch:
                    self._answer(verdict, None)

    def record(self, key: bytes) -> ShardRecord | None:
        """Return the record that the lookup of a chunk found."""
        verdict = self._known.get(key)
        return None if verdict is None else verdict.record

    def deny(self, keys: Iterable[bytes]) -> None:
        """Make later lookups of these keys miss, because their load failed."""
        for key in keys:
            if verdict := self._known.get(key):
                self._answer(verdict, None)

    def forget(self, request_id: str) -> None:
        """Forget a request that ended, and the keys that only this request looked up."""
        for key in self._asked.pop(request_id, ()):
            verdict = self._known.get(key)
            if verdict is None:
                continue
            verdict.askers.discard(request_id)
            if not verdict.askers:
                del self._known[key]

    def clear(self) -> None:
        """Forget all answers."""
        self._known.clear()
        self._asked.clear()
        self._new.clear()

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        """Run ``job`` in the background, or return False if the queue is full."""
        return self._pool.submit(job)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close()

    def __repr__(self) -> str:
        return f"<TierLookups {len(self._known)} keys of {len(self._asked)} requests>"

    def _begin(self, namespace: str, key: bytes, askers: set[str]) -> _Verdict:
        deadline = self._clock() + self._limits.deadline_s
        verdict = _Verdict(chunk_key(namespace, key), deadline, askers)
        self._known[key] = verdict
        self._new.append(verdict)
        return verdict

    def _is_stale(self, verdict: _Verdict, request_id: str) -> bool:
        """Whether an answer is too old for a new request. Without this check overlapping requests
        could use one old answer for ever."""
        return (
            verdict.answered
            and request_id not in verdict.askers
            and self._clock() - verdict.answered_at > self._limits.age_max_s
        )

    def _answer(self, verdict: _Verdict, record: ShardRecord | None) -> None:
        verdict.record, verdict.answered_at = record, self._clock()
        verdict.answered = True

    def _find(self, batch: list[_Verdict]) -> None:
        """Look up a batch in one call, on a background thread. All its keys have one namespace."""
        namespace = batch[0].key.namespace
        hashes = list(dict.fromkeys(verdict.key.prefix_hash for verdict in batch))
        fields = sorted({verdict.key.field for verdict in batch})
        try:
            found = self._index.find(namespace, hashes, fields)
        except StoreError:
            self._recorder.count("tier_lookup_errors")
            found = [None] * len(hashes)
        shards = dict(zip(hashes, found, strict=True))
        for verdict in batch:
            if not verdict.answered:  # else it was late
                of_chunk = shards[verdict.key.prefix_hash] or {}
                self._answer(verdict, of_chunk.get(verdict.key.field))
