"""Per-request state of the scheduler's side: limits, hashes, and the records of stored chunks.
While a lookup is in progress, calls take the same time for prompts of any length."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from threading import Lock
from time import sleep
from typing import TYPE_CHECKING, Any

import torch

from objkv.agent.messages import PrefetchOrder, is_held_back
from objkv.background import Steps, in_steps
from objkv.cache.lookup import LookupService, Records
from objkv.connector.kv.metadata import StepReport
from objkv.connector.kv.planning import StoredPayloads
from objkv.connector.model.weights import Adapters, UnknownAdapterError
from objkv.keys.prefix import MultimodalItem, PrefixChain, PromptExtras
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)
_PUT_S = 30.0
"""How long reading what an agent's disk holds back may take."""
_KINDS: dict[str, type[Any]] = {
    "max_load_tokens": int,
    "max_offload_tokens": int,
    "objkv_put": bool,
}
"""Parameters of ``RequestLimits``, in its order. The last is objkv's own."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request."""

    load_tokens_max: int | None = None
    """Most tokens to load beyond those that vLLM has. None: any number."""
    save_tokens_max: int | None = None
    """Most leading tokens to save. None: all."""
    puts: bool = False
    """Whether a node's agent puts what is saved at once, and what it holds back already."""


NO_LIMITS = RequestLimits()
Prefetch = Callable[[str, Sequence[bytes], PrefetchOrder], Steps[int] | int]
"""Namespace, prefix hashes and order. Raises ``StoreError``."""


class LimitReader:
    """Reads the limits of requests. For the scheduler's thread only. Never raises. Names and
    meanings are those of vLLM's own ``OffloadingConnector``, so that a router can send the same
    parameters whatever stores the KV. Source: vLLM 0.33,
    ``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._logged = recorder, set[str]()

    def read(self, params: object) -> RequestLimits:
        """``params``: a request's ``kv_transfer_params``, as its client has sent them."""
        if not isinstance(params, dict):
            return NO_LIMITS
        loads, saves, puts = (self._valid(name, params.get(name)) for name in _KINDS)
        return RequestLimits(loads, saves, puts is True)

    def _valid(self, name: str, value: Any) -> Any:
        if value is None or (type(value) is _KINDS[name] and value >= 0):  # a bool is an int
            return value
        self._recorder.count("limits_ignored")
        if name not in self._logged:
            self._logged.add(name)
            logger.warning("transfer parameter ignored name=%s value=%.100r", name, value)
        return None


_PIECE_CHUNKS = 8
"""A thread lets others run after this many chunks: 2048 tokens take 65 µs, but the interpreter
alone would switch threads only after 5 ms (2-core x86, 2026-11)."""
_AT_ONCE_CHUNKS = 4
"""Most chunks that the scheduler's thread hashes itself, as while a request generates."""


class RequestHashes:
    """Hashes of the whole chunks of a request, computed on lookup threads because a long prompt
    takes milliseconds. ``ready`` is for the scheduler's thread and takes microseconds; slices are
    for other threads. vLLM only appends to a request's tokens, except in resumable sessions, which
    objkv does not support. Source: vLLM 0.31-0.33, ``v1/request.py``."""

    def __init__(
        self, request: "Request", namespace: str, lora_digest: bytes | None, chunk_tokens: int
    ) -> None:
        # The parts of the prompt as they are now: another thread reads them later.
        self._salt, self._features = request.cache_salt, tuple(request.mm_features)
        self._embeds = request.prompt_embeds  # [tokens, hidden] on the CPU, never changed here
        self._is_token_ids = None if self._embeds is None else request.prompt_is_token_ids
        self._namespace = namespace
        self._lora_digest, self._chunk_tokens = lora_digest, chunk_tokens
        self._tokens: Sequence[int] = request.all_token_ids
        self._lock = Lock()
        self._chain: PrefixChain | None = None
        self._asked = False
        self.failed = False
        """Whether computing the hashes failed permanently."""

    def __len__(self) -> int:
        return len(self._tokens) // self._chunk_tokens

    def __getitem__(self, chunks: slice, /) -> Sequence[bytes]:
        start, end, _ = chunks.indices(len(self))
        return self._computed(end).hashes(start, end)

    @property
    def chain(self) -> PrefixChain:
        """The chain of the hashes that ``ready`` has counted."""
        assert self._chain is not None
        return self._chain

    @property
    def done(self) -> int:
        """Number of leading chunks whose hashes are computed."""
        return 0 if self._chain is None else len(self._chain)

    def ready(self, count: int, submit: Callable[[Callable[[], None]], bool]) -> int:
        """Return how many of the first ``count`` hashes are computed, and start computing the rest.
        ``submit`` runs a job on another thread, or returns False if too many are queued."""
        done = self.done
        if done >= count or self.failed:
            return min(done, count)
        if done and count - done <= _AT_ONCE_CHUNKS and self._lock.acquire(blocking=False):
            try:
                self.chain.extend(self._tokens, count * self._chunk_tokens)
            except Exception:
                # Fail this request only. Raising would stop the saves of all others at every step.
                self.failed = True
                return done
            finally:
                self._lock.release()
            return count
        if not self._asked:
            self._asked = True  # before the job can end, which may be before ``submit`` returns
            if not submit(self._compute_all):
                self._asked = False
        return done

    def _compute_all(self) -> None:
        try:
            self._computed(len(self))
        finally:
            self._asked = False

    def _computed(self, count: int) -> PrefixChain:
        with self._lock:
            try:
                chain = self._chain or self._open()
                while (done := len(chain)) < count:
                    until = min(done + _PIECE_CHUNKS, count)
                    chain.extend(self._tokens, until * self._chunk_tokens)
                    if until < count:
                        sleep(0)
            except Exception:
                self.failed = True
                raise
        return chain

    def _open(self) -> PrefixChain:
        extras = PromptExtras(
            lora_digest=self._lora_digest,
            salt=self._salt,
            items=tuple(
                MultimodalItem(
                    feature.identifier.encode(),
                    feature.mm_position.offset,
                    feature.mm_position.length,
                )
                for feature in self._features
            ),
            embeds={} if self._embeds is None else self._embed_digests(self._embeds),
        )
        self._chain = PrefixChain(self._namespace, self._chunk_tokens, extras, digests=True)
        return self._chain

    def _embed_digests(self, embeds: torch.Tensor) -> dict[int, bytes]:
        """Return a SHA-256 per chunk of embeddings: of rows, and where token ids are."""
        digests = {}
        for chunk, start in enumerate(range(0, embeds.shape[0], self._chunk_tokens)):
            span = slice(start, start + self._chunk_tokens)
            rows = embeds[span].contiguous()
            digest = hashlib.sha256(f"{rows.dtype}{tuple(rows.shape)}".encode())
            digest.update(rows.view(torch.uint8).numpy().data)
            if self._is_token_ids is not None:
                digest.update(bytes(self._is_token_ids[span]))
            digests[chunk] = digest.digest()
        return digests


_RETRIES_MAX = 16
"""Dropped chunks of a request that are retried per step. Planning costs the scheduler 4 µs per
chunk and each worker more (2 cores, 2026-11), and a queue that was full accepts few at once."""
_WAITING_MAX = 1024
"""Most requests to count as waiting, which takes 50 µs of the scheduler's time once per step."""


@dataclass(slots=True)
class TrackedRequest:
    """One request. ``request`` is owned by vLLM and never changed here."""

    request: "Request"
    namespace: str
    deadline: float = inf
    """Time until which to wait for the digest of its adapter, which its chunks' hashes need."""
    hashes: RequestHashes | None = None
    """None while its adapter is not identified."""
    records: Records = ()
    """Records of its chunks from the last lookup."""
    planned: int = 0
    """Number of leading chunks whose save was decided. Each is decided once."""
    again: set[int] = field(default_factory=set)
    """Planned chunks that must be saved again."""
    match_result: "MatchResult | None" = None
    local_tokens: int = 0
    """Number of leading tokens that vLLM had at its last query for a match."""
    queried: bool = False
    """Whether vLLM has not allocated blocks since that query."""
    draft_complete: bool = True
    """False after a load without the draft's KV. See ``DraftGaps``."""
    accounted: int = 0
    """Number of leading tokens that were computed here or loaded by objkv."""
    no_saves_before_step: int = 0
    """Step before which nothing of it may be saved, see ``BlockTrust``."""
    saved: bool = False
    """Whether any save was planned."""
    awaited: bool = False
    """Whether the scheduler's thread has waited for its lookup, which it does once."""
    may_load: bool = True
    may_save: bool = True
    limits: RequestLimits = NO_LIMITS

    @property
    def traceparent(self) -> str | None:
        """The request's trace context. vLLM passes it on only if it sends traces itself."""
        headers = self.request.trace_headers
        return headers.get("traceparent") if headers else None


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The result of a match, cached because the scheduler matches in a hot loop."""

    records: Records
    num_tokens: int
    computed: int
    end: int
    """End of the match in tokens."""
    sync: bool


class RequestTracker:
    """The requests in progress, by id. For the scheduler's thread only. Never waits."""

    def __init__(
        self,
        lookups: LookupService,
        recorder: Recorder,
        payloads: StoredPayloads,
        *,
        prefetch: Prefetch,
    ) -> None:
        """``prefetch``: of the node's agent."""
        self._lookups, self._recorder = lookups, recorder
        self.payloads, self._prefetch = payloads, prefetch
        self.adapters, self._limits = Adapters(lookups.submit), LimitReader(recorder)
        self._tracked: dict[str, TrackedRequest] = {}
        self._has_met_session = False

    def add(self, request: "Request", namespace: str, *, trusted: bool = True) -> TrackedRequest:
        """Track a request and start the lookup of its prompt. ``trusted``: whether the weights and
        images that determine its KV are identified."""
        tracked = TrackedRequest(request, namespace)
        if request.lora_request is not None:
            tracked.deadline = self._lookups.deadline()
        if request.kv_transfer_params:
            tracked.limits = self._limits.read(request.kv_transfer_params)
        self._tracked[request.request_id] = tracked
        if request.resumable or not trusted:
            # In a resumable session vLLM removes a token of the prompt and adds tokens and images,
            # so earlier hashes would name different KV.
            tracked.may_load = tracked.may_save = False
            if request.resumable and not self._has_met_session:
                self._has_met_session = True
                logger.info("sessions with streaming input are not shared")
        self.records(tracked)
        return tracked

    def __len__(self) -> int:
        return len(self._tracked)

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all requests that have not ended."""
        return tuple(self._tracked)

    def waiting(self) -> int:
        """Return how many of the first ``_WAITING_MAX`` requests have no computed token yet."""
        first = islice(self._tracked.values(), _WAITING_MAX)
        return sum(not one.request.num_computed_tokens for one in first)

    def get(self, request_id: str) -> TrackedRequest | None:
        """Return the state of a request, or None if it has ended."""
        return self._tracked.get(request_id)

    def end(self, request_id: str) -> TrackedRequest | None:
        """Stop tracking a request."""
        self._lookups.forget(request_id)
        self.adapters.ended(request_id)
        return self._tracked.pop(request_id, None)

    def save_nothing(self) -> None:
        """Stop saves of all requests, because their blocks may not be what objkv takes them for."""
        for tracked in self._tracked.values():
            tracked.may_save = False

    def distrust(self) -> None:
        """Stop loads and saves of all requests in progress, because weights may have changed."""
        self.adapters.forget()
        for request_id, tracked in self._tracked.items():
            tracked.may_load = tracked.may_save = False
            self._lookups.forget(request_id)

    def save_again(self, report: StepReport) -> list[TrackedRequest]:
        """Mark chunks to be saved again: those whose save was dropped, and those that were indexed
        but missing or corrupt, by the requests that compute them. Returns these requests."""
        found = list[TrackedRequest]()
        for request_id, chunk in report.dropped:
            if tracked := self._tracked.get(request_id):
                tracked.again.add(chunk)
                found.append(tracked)
        rejected = frozenset(prefix_hash for _, prefix_hash in report.rejected)
        for tracked in self._tracked.values() if rejected else ():
            if tracked.hashes is None or not tracked.hashes.done:
                continue
            chunks = tracked.hashes.chain.find(rejected)
            if again := {chunk for chunk in chunks if any(tracked.records[chunk : chunk + 1])}:
                tracked.again |= again
                found.append(tracked)
        return found

    def records(self, tracked: TrackedRequest) -> Records | None:
        """Return the records of the request's chunks, or None while its lookup is in progress."""
        if not (tracked.may_load or tracked.may_save):
            return ()
        hashes = self.hashes(tracked)
        if hashes is None:
            waits = tracked.may_load and not self._lookups.is_late(tracked.deadline)
            return None if waits else ()
        name, trace = tracked.request.request_id, tracked.traceparent
        records = self._lookups.ask(name, tracked.namespace, hashes, trace)
        if records is not None and records is not tracked.records:
            tracked.records = records
            self._put_held_back(tracked, hashes, records)
        return records

    def _put_held_back(
        self, tracked: TrackedRequest, hashes: RequestHashes, records: Records
    ) -> None:
        """Have the agent put what it holds back of a request that is to be put. Reading it again
        would do so too, but vLLM reads nothing of a prompt in its own prefix cache."""
        if tracked.limits.puts and any(
            is_held_back(one) for shards in records if shards for one in shards.values()
        ):
            self._lookups.submit(partial(self._put, tracked.namespace, hashes, len(records)))

    def _put(self, namespace: str, hashes: RequestHashes, count: int) -> Steps[None]:
        order = PrefetchOrder(_PUT_S, puts=True)
        yield from in_steps(self._prefetch(namespace, hashes[:count], order))

    def hashing(self, tracked: TrackedRequest) -> bool:
        """Whether the hashes for its saves are still being computed. The request is held back
        meanwhile, because a short one could finish in the next step and never be saved."""
        if tracked.hashes is not None and tracked.hashes.done >= len(tracked.hashes):
            return False
        return self.records(tracked) is None

    def due(self, tracked: TrackedRequest, computed: int) -> list[int]:
        """Return the chunks to save after ``computed`` leading chunks are complete, each once.
        Chunks whose hashes are still being computed follow in a later step."""
        if (hashes := self.hashes(tracked)) is None:
            return []
        ready, records = hashes.ready(computed, self._lookups.submit), tracked.records
        due = set(sorted(chunk for chunk in tracked.again if chunk < ready)[:_RETRIES_MAX])
        tracked.again -= due
        for chunk in range(tracked.planned, ready):
            shards = records[chunk] if chunk < len(records) else None
            if shards is None or not self.payloads.is_complete(shards):
                due.add(chunk)
        tracked.planned = max(tracked.planned, ready)
        return sorted(due)

    def hashes(self, tracked: TrackedRequest) -> RequestHashes | None:
        """Return the request's hashes. None if its adapter is not identified yet, or cannot be."""
        if tracked.hashes is not None:
            return tracked.hashes
        lora, request = None, tracked.request
        if request.lora_request is not None:
            try:
                lora = self.adapters.digest(request.request_id, request.lora_request)
            except UnknownAdapterError:
                tracked.may_load = tracked.may_save = False
                self._recorder.count("adapters_unknown")
                return None
            if lora is None:
                return None
        size = self.payloads.geometry.chunk_tokens
        tracked.hashes = RequestHashes(request, tracked.namespace, lora, size)
        return tracked.hashes
