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


@dataclass(slots=True, eq=False)
class _Verdict:
    key: ChunkKey
    deadline: float
    answered: bool = False
    """Set last, by the background thread or by the scheduler's thread."""
    is_stored: bool = False


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
        if not verdict.answered:
            if self._clock() < verdict.deadline:
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

    def has_found(self, request_id: str, key: bytes) -> bool:
        """Whether a request's lookup of a chunk found that it is stored."""
        verdict = self._asked.get(request_id, {}).get(key)
        return verdict is not None and verdict.is_stored

    def deny(self, keys: Sequence[bytes]) -> None:
        """Make further lookups of these keys by present requests miss, because their load
        failed."""
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

    def _answer(self, verdict: _Verdict, *, is_stored: bool) -> None:
        verdict.is_stored = is_stored
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
            for verdict, shards in zip(left, found, strict=True):
                if not verdict.answered:  # else it was late
                    self._answer(verdict, is_stored=shards is not None and key.field in shards)


def _note_failure(error: Exception) -> None:
    if not isinstance(error, StoreError):
        logger.error("tier job failed unexpectedly", exc_info=error)
