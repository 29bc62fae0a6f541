"""What the scheduler's side remembers of each request: its hashes, and what is stored of it.

Nothing here costs more for a longer prompt while its lookup is under way.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from threading import Lock
from time import sleep
from typing import TYPE_CHECKING, Any

import torch

from objkv.cache.lookup import LookupService, Records
from objkv.connector.kv.coverage import Coverage
from objkv.connector.model.adapters import Adapters, UnknownAdapterError
from objkv.connector.model.groups import Geometry
from objkv.connector.model.weights import DigestCache
from objkv.keys.prefix import MultimodalItem, PrefixChain, PromptExtras
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a request's prompt consists of besides tokens, as it was when the request arrived.

    Taken at once and read on another thread: whatever becomes of the request meanwhile, its hashes
    name the prompt that it came with.
    """

    salt: str | None
    features: tuple[Any, ...]
    embeds: torch.Tensor | None
    """``[tokens, hidden]`` on the CPU; vLLM's own, read and never changed."""
    is_token_ids: Sequence[bool] | None

    @classmethod
    def of(cls, request: "Request") -> "PromptParts":
        """Those of a request; takes references only."""
        embeds = request.prompt_embeds
        mask = None if embeds is None else request.prompt_is_token_ids
        return cls(request.cache_salt, tuple(request.mm_features), embeds, mask)

    def extras(self, lora_digest: bytes | None, chunk_tokens: int) -> PromptExtras:
        """What identifies the prompt's KV besides token ids. May take long: hashes embeddings."""
        return PromptExtras(
            lora_digest=lora_digest,
            salt=self.salt,
            items=tuple(
                MultimodalItem(
                    feature.identifier.encode(),
                    feature.mm_position.offset,
                    feature.mm_position.length,
                )
                for feature in self.features
            ),
            embeds=self._digests(chunk_tokens),
        )

    def _digests(self, chunk_tokens: int) -> dict[int, bytes]:
        """Per chunk of a prompt given by embeddings: SHA-256 of its rows, and of which count."""
        if self.embeds is None:
            return {}
        digests = {}
        for chunk, start in enumerate(range(0, self.embeds.shape[0], chunk_tokens)):
            rows = self.embeds[start : start + chunk_tokens].contiguous()
            digest = hashlib.sha256(f"{rows.dtype}{tuple(rows.shape)}".encode())
            digest.update(rows.view(torch.uint8).numpy().data)
            if self.is_token_ids is not None:
                digest.update(bytes(self.is_token_ids[start : start + chunk_tokens]))
            digests[chunk] = digest.digest()
        return digests


_PIECE_CHUNKS = 8
"""After which a thread lets others run: 2048 tokens take 65 µs, where the interpreter alone would
let them wait 5 ms for their turn (2-core x86, 2026-11)."""
_AT_ONCE_CHUNKS = 4
"""Chunks that the scheduler's own thread computes: a request's next one as it generates tokens."""


class RequestHashes:
    """Hashes of the whole chunks of a request's tokens, computed on lookup threads: a long prompt
    takes milliseconds.

    Tokens of a request are only appended to, except in resumable sessions, which objkv does not
    follow. Source: vLLM 0.31-0.33, ``v1/request.py``. ``ready`` is for the scheduler's thread and
    takes microseconds; slices are for other threads.
    """

    def __init__(
        self, request: "Request", namespace: str, lora_digest: bytes | None, chunk_tokens: int
    ) -> None:
        self._parts = PromptParts.of(request)
        self._namespace = namespace
        self._lora_digest = lora_digest
        self._chunk_tokens = chunk_tokens
        self._tokens: Sequence[int] = request.all_token_ids
        self._lock = Lock()
        self._chain: PrefixChain | None = None
        self._asked = False
        self.failed = False
        """Whether they cannot be computed, for a reason that will not go away."""

    def __len__(self) -> int:
        return len(self._tokens) // self._chunk_tokens

    def __getitem__(self, chunks: slice, /) -> Sequence[bytes]:
        start, end, _ = chunks.indices(len(self))
        return self._computed(end).hashes(start, end)

    @property
    def chain(self) -> PrefixChain:
        """Holds the hashes that ``ready`` counted."""
        assert self._chain is not None
        return self._chain

    @property
    def done(self) -> int:
        """How many leading chunks are computed."""
        return 0 if self._chain is None else len(self._chain)

    def ready(self, count: int, submit: Callable[[Callable[[], None]], bool]) -> int:
        """How many of the first ``count`` hashes are computed; the rest soon will be.

        ``submit`` runs a job on another thread, unless there are too many.
        """
        done = self.done
        if done >= count or self.failed:
            return min(done, count)
        if done and count - done <= _AT_ONCE_CHUNKS and self._lock.acquire(blocking=False):
            try:
                self.chain.extend(self._tokens, count * self._chunk_tokens)
            except Exception:
                # Of this request alone: raised, it would cost all others their saves, every step.
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
        extras = self._parts.extras(self._lora_digest, self._chunk_tokens)
        self._chain = PrefixChain(self._namespace, self._chunk_tokens, extras, digests=True)
        return self._chain


_RETRIES_MAX = 16
"""Dropped chunks of a request that are tried again in one step. Planning costs the scheduler
4 µs a chunk, each worker more (2 cores, 2026-11), and a queue that was full takes few at once."""
_WAITING_MAX = 1024
"""Requests looked at to see whether they wait: 50 µs of the scheduler's time, once a
step."""


@dataclass(slots=True)
class TrackedRequest:
    """One request. ``request`` is vLLM's own, read and never changed."""

    request: "Request"
    namespace: str
    deadline: float = inf
    """Until when to wait for the digest of its adapter, without which its chunks have no names."""
    hashes: RequestHashes | None = None
    """None while its adapter is not known."""
    records: Records = ()
    """What was found of its chunks when they were last looked up."""
    stored: set[int] = field(default_factory=set)
    """Chunks that were stored when they were looked up."""
    planned: int = 0
    """Leading chunks whose save was decided: each is looked at once, a step costs nothing after."""
    again: set[int] = field(default_factory=set)
    """Chunks among those that have to be saved after all."""
    usable: "Usable | None" = None
    accounted: int = 0
    """Leading tokens known to be in place: computed here before, or loaded by objkv."""
    doubtful_until: int = 0
    """The step, see ``BlockTrust``, before which nothing may be saved of it."""
    saved: bool = False
    """Whether any save was planned."""
    may_load: bool = True
    may_save: bool = True

    @property
    def traceparent(self) -> str | None:
        """Of the trace that the request came with, if vLLM passes it on: only where it sends
        traces itself. Source: vLLM 0.31-0.33, ``v1/engine/async_llm.py``."""
        headers = getattr(self.request, "trace_headers", None)
        return headers.get("traceparent") if headers else None

    def due(self, computed: int) -> list[int]:
        """Chunks to save now that ``computed`` leading chunks are, each returned once."""
        if computed <= self.planned and not self.again:
            return []
        again = set(sorted(chunk for chunk in self.again if chunk < computed)[:_RETRIES_MAX])
        self.again -= again
        fresh = set(range(self.planned, computed)) - self.stored | again
        self.planned = max(self.planned, computed)
        return sorted(fresh)


@dataclass(frozen=True, slots=True)
class Usable:
    """What a match came to, kept because the scheduler matches in a hot loop."""

    records: Records
    num_tokens: int
    computed: int
    end: int
    """Of the match, in tokens."""
    sync: bool


class RequestTracker:
    """Requests by id. Used by the scheduler's thread only; never waits."""

    def __init__(
        self,
        geometry: Geometry,
        lookups: LookupService,
        recorder: Recorder,
        digests: DigestCache | None = None,
        coverage: Coverage | None = None,
    ) -> None:
        """``digests``: of adapters; without it each engine reads them once. ``coverage``: finds
        other shards than this replica's own as well."""
        self._geometry = geometry
        self._lookups = lookups
        self._recorder = recorder
        self.adapters = Adapters(lookups.submit, digests)
        self._tracked: dict[str, TrackedRequest] = {}
        self.coverage = coverage or Coverage(geometry)
        """What of a chunk this replica can be served from."""

    def add(self, request: "Request", namespace: str, *, trusted: bool = True) -> TrackedRequest:
        """Start to follow a request, and to look its prompt up.

        ``trusted``: whether it is known which weights, and which images, its KV will be of.
        """
        tracked = TrackedRequest(request, namespace, self._lookups.deadline())
        self._tracked[request.request_id] = tracked
        if request.resumable or not trusted:
            # Resumable, a session: vLLM takes back a token of its prompt, and adds others and
            # images, so that hashes made before would name other KV.
            tracked.may_load = tracked.may_save = False
        self.records(tracked)
        return tracked

    def ids(self) -> tuple[str, ...]:
        """All requests that have not ended."""
        return tuple(self._tracked)

    def waiting(self) -> int:
        """How many of the first ``_WAITING_MAX`` requests have nothing computed yet."""
        first = islice(self._tracked.values(), _WAITING_MAX)
        return sum(not one.request.num_computed_tokens for one in first)

    def get(self, request_id: str) -> TrackedRequest | None:
        """What is known of a request that has not ended."""
        return self._tracked.get(request_id)

    def end(self, request_id: str) -> TrackedRequest | None:
        """Stop following a request."""
        self._lookups.forget(request_id)
        self.adapters.ended(request_id)
        return self._tracked.pop(request_id, None)

    def distrust(self) -> None:
        """Weights may have changed: requests under way neither load nor save any more."""
        self.adapters.forget()
        for request_id, tracked in self._tracked.items():
            tracked.may_load = tracked.may_save = False
            self._lookups.forget(request_id)

    def unstore(self, request_id: str, chunk: int) -> None:
        """A save was dropped: the chunk is to be saved after all."""
        if tracked := self._tracked.get(request_id):
            tracked.again.add(chunk)

    def reject(self, prefix_hashes: Iterable[bytes]) -> None:
        """Chunks turned out not to be stored: requests that compute them are to save them."""
        rejected = frozenset(prefix_hashes)
        if not rejected:
            return
        for tracked in self._tracked.values():
            if tracked.hashes is None or not tracked.hashes.done:
                continue
            for chunk in tracked.hashes.chain.find(rejected):
                if any(tracked.records[chunk : chunk + 1]):
                    tracked.again.add(chunk)

    def records(self, tracked: TrackedRequest) -> Records | None:
        """What was found of the request's chunks, or None while it is not known."""
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
            complete = self.coverage.is_complete
            tracked.stored |= {i for i, r in enumerate(records) if r and complete(r)}
        return records

    def hashing(self, tracked: TrackedRequest) -> bool:
        """True while the hashes that its saves need are still being computed: the request is held
        back, because a short one could finish in the next step and never be saved."""
        if tracked.hashes is not None and tracked.hashes.done >= len(tracked.hashes):
            return False
        return self.records(tracked) is None

    def due(self, tracked: TrackedRequest, computed: int) -> list[int]:
        """Chunks to save now that ``computed`` leading chunks are, each returned once; those whose
        hashes are still being computed in a later step."""
        hashes = self.hashes(tracked)
        if hashes is None:
            return []
        return tracked.due(hashes.ready(computed, self._lookups.submit))

    def hashes(self, tracked: TrackedRequest) -> RequestHashes | None:
        """The request's hashes, or None while its adapter is not known, or cannot be."""
        if tracked.hashes is not None:
            return tracked.hashes
        lora = None
        request = tracked.request
        if request.lora_request is not None:
            try:
                lora = self.adapters.digest(request.request_id, request.lora_request)
            except UnknownAdapterError:
                tracked.may_load = tracked.may_save = False
                self._recorder.count("adapters_unknown")
                return None
            if lora is None:
                return None
        size = self._geometry.chunk_tokens
        tracked.hashes = RequestHashes(request, tracked.namespace, lora, size)
        return tracked.hashes
