"""Lookups of a secondary tier: vLLM queries single keys, and the agent is asked for many at once.

vLLM queries one key after another in each step until it gets a miss. The new keys of a step are
looked up in the background when the step is planned, with one question for each request and group.
A late, failed or refused question is a miss.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from vllm.v1.kv_offload.base import LookupResult

from objkv.agent.client import CALL_S
from objkv.background import Steps, StepThread, in_steps
from objkv.cache.lookup import FindIndex, LookupLimits
from objkv.connector.tier.jobs import chunk_key
from objkv.errors import StoreError
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
_KEYS_MAX = 1 << 20
"""Most keys to remember, about 300 bytes each. Further ones are misses."""


@dataclass(slots=True, eq=False)
class _Verdict:
    key: ChunkKey
    deadline: float
    askers: set[str]
    answered: bool = False
    """Set last, by the background thread or by the scheduler's thread."""
    is_open: bool = False
    """Whether the answer to its question ended before it."""
    is_stored: bool = False
    answered_at: float = 0.0


class TierLookups:
    """Lookups by key. For the scheduler's thread only. Never waits."""

    def __init__(
        self,
        index: FindIndex,
        recorder: Recorder,
        limits: LookupLimits,
        *,
        ends_early: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``limits.age_max_s``: new requests do not use answers older than this. ``ends_early``:
        whether the index ends its answer to several keys at the first missing one."""
        self._index, self._recorder, self._limits, self._clock = index, recorder, limits, clock
        self._ends_early = ends_early
        self._thread = StepThread(
            "objkv-tier-lookup", answer_s=CALL_S, queue_max=limits.queue_max, failed=_note_failure
        )
        self._known: dict[bytes, _Verdict] = {}
        self._asked: dict[str, set[bytes]] = {}
        self._new: dict[object, list[_Verdict]] = {}
        """Keys to look up, by request and group, or one by one."""

    def ask(self, request_id: str, namespace: str, key: bytes) -> LookupResult:
        """Return whether the chunk is stored, or RETRY while that is unknown."""
        verdict = self._known.get(key)
        if verdict is None or self._is_stale(verdict, request_id):
            if verdict is None and len(self._known) >= _KEYS_MAX:
                self._recorder.count("lookup_refused")
                return LookupResult.MISS
            askers = set() if verdict is None else verdict.askers
            deadline = self._clock() + self._limits.deadline_s
            verdict = self._known[key] = _Verdict(chunk_key(namespace, key), deadline, askers)
            self._new.setdefault((request_id, verdict.key.group), []).append(verdict)
        if request_id not in verdict.askers:
            verdict.askers.add(request_id)
            self._asked.setdefault(request_id, set()).add(key)
        if not verdict.answered:
            if self._clock() < verdict.deadline:
                if verdict.is_open:  # as of a window, which vLLM reads from its end
                    verdict.is_open = False
                    self._new[key] = [verdict]
                return LookupResult.RETRY
            self._recorder.count("lookup_deadlines")
            self._answer(verdict, is_stored=False)
        return LookupResult.HIT if verdict.is_stored else LookupResult.MISS

    def flush(self) -> None:
        """Look up the new keys of the planned step."""
        questions, self._new = list(self._new.values()), {}
        if questions and not self.submit(partial(self._find, questions)):
            for verdicts in questions:
                self._recorder.count("lookup_refused", len(verdicts))
                self._miss(verdicts)

    def has_found(self, key: bytes) -> bool:
        """Whether the lookup of a chunk found that it is stored."""
        verdict = self._known.get(key)
        return verdict is not None and verdict.is_stored

    def deny(self, keys: Iterable[bytes]) -> None:
        """Make later lookups of these keys miss, because their load failed."""
        self._miss([self._known[key] for key in keys if key in self._known])

    def forget(self, request_id: str) -> None:
        """Forget a request that ended, and the keys that only this request looked up."""
        for key in self._asked.pop(request_id, ()):
            if (verdict := self._known.get(key)) is not None:
                verdict.askers.discard(request_id)
                if not verdict.askers:
                    del self._known[key]

    def clear(self) -> None:
        """Forget all answers."""
        for memory in (self._known, self._asked, self._new):
            memory.clear()

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        """See ``StepThread.run``. A ``StoreError`` of the job is dropped."""
        return self._thread.run(job)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close(0.0)

    def _is_stale(self, verdict: _Verdict, request_id: str) -> bool:
        """Whether an answer is too old for a new request. Without this check overlapping requests
        could use one old answer for ever."""
        return (
            verdict.answered
            and request_id not in verdict.askers
            and self._clock() - verdict.answered_at > self._limits.age_max_s
        )

    def _answer(self, verdict: _Verdict, *, is_stored: bool) -> None:
        verdict.is_stored, verdict.answered_at = is_stored, self._clock()
        verdict.answered = True

    def _miss(self, verdicts: Iterable[_Verdict]) -> None:
        for verdict in verdicts:
            self._answer(verdict, is_stored=False)

    def _find(self, questions: Sequence[Sequence[_Verdict]]) -> Steps[None]:
        """Look up keys, those of one namespace and group in one call."""
        for verdicts in questions:
            key = verdicts[0].key
            left = [one for one in verdicts if not one.answered]  # the others were late
            hashes = [one.key.prefix_hash for one in left]
            try:
                found = yield from in_steps(self._index.find(key.namespace, hashes, (key.field,)))
            except StoreError:
                self._recorder.count("lookup_errors")
                self._miss(left)
                continue
            has_ended = False
            for verdict, shards in zip(left, found, strict=True):
                is_stored = shards is not None and key.field in shards
                if has_ended and not is_stored and self._ends_early:
                    verdict.is_open = True
                elif not verdict.answered:  # else it was late
                    self._answer(verdict, is_stored=is_stored)
                has_ended |= not is_stored


def _note_failure(error: Exception) -> None:
    if not isinstance(error, StoreError):
        logger.error("tier job failed unexpectedly", exc_info=error)
