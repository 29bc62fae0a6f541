"""The prefix hashes of a request, computed on lookup threads: a long prompt takes milliseconds.

Source of what never changes in a request: vLLM 0.31-0.33, ``v1/request.py``: its tokens are only
appended to, except in resumable sessions, which objkv does not follow.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from time import sleep
from typing import TYPE_CHECKING

from objkv.connector.prompts import PromptParts
from objkv.keys.prefix import PrefixChain

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PIECE_CHUNKS = 8
"""After which a thread lets others run: 2048 tokens take 65 µs, where the interpreter alone would
let them wait 5 ms for their turn (2-core x86, 2026-11)."""
_AT_ONCE_CHUNKS = 4
"""Chunks that the scheduler's own thread computes: a request's next one as it generates tokens."""


class RequestHashes:
    """Hashes of the whole chunks of a request's tokens.

    ``ready`` is for the scheduler's thread and takes microseconds; slices are for other threads.
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
        """What ``ready`` told of can be read from it."""
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
