"""Which prompt is computed next, so that what several share is computed once.

Prompts make a tree by their chunks. A prompt that is being computed claims the chunks that it lacks
until they are stored; another one that needs a claimed chunk waits. So of all prompts under a
shared prefix one goes first and alone, and the others load what it saved. Prompts that many others
wait for go first.
"""

import heapq
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt whose turn has come."""

    number: int
    root: bytes
    """Of its tree: prompts with the same one are best computed by the same engine."""
    missing: int
    """Chunks that nobody has stored so far; 0: others have computed all of it."""


class Order:
    """One thread uses it. About 200 bytes for each distinct chunk."""

    def __init__(self) -> None:
        self._names: dict[bytes, int] = {}
        self._uses = array("I")
        self._chunks: dict[int, array[int]] = {}
        self._roots: dict[int, bytes] = {}
        self._stored: set[int] = set()
        self._claims: dict[int, int] = {}
        """By chunk: the prompt that computes it."""
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        self._heap: list[tuple[int, int]] = []
        self._weights: dict[int, int] = {}
        self._is_begun = False

    def add(self, number: int, chunks: Sequence[bytes], stored: int) -> None:
        """A prompt, of whose ``chunks`` the first ``stored`` are. All are added before the first
        turn."""
        assert not self._is_begun
        assert chunks
        own = array("I")
        for position, name in enumerate(chunks):
            chunk = self._names.setdefault(name, len(self._names))
            if chunk == len(self._uses):
                self._uses.append(0)
            self._uses[chunk] += 1
            if position < stored:
                self._stored.add(chunk)
            own.append(chunk)
        self._chunks[number], self._roots[number] = own, chunks[0]

    def next(self) -> Turn | None:
        """The next one, which claims what it lacks; None while all wait, or nothing is left."""
        if not self._is_begun:
            self._begin()
        while self._heap:
            _, number = heapq.heappop(self._heap)
            missing = self._missing(number)
            if missing and missing[0] in self._claims:
                self._waiting[missing[0]].append(number)
                continue
            for chunk in missing:
                self._claims[chunk] = number
            if not missing:
                self._chunks.pop(number)
            return Turn(number, self._roots[number], len(missing))
        return None

    def end(self, number: int, *, stored: bool) -> None:
        """The prompt whose turn it was is stored now, or has failed for good."""
        for chunk in self._chunks.pop(number):
            if self._claims.get(chunk) == number:
                del self._claims[chunk]
                if stored:
                    self._stored.add(chunk)
                for other in self._waiting.pop(chunk, ()):
                    self._push(other)

    @property
    def is_empty(self) -> bool:
        """Whether every prompt has ended."""
        return not self._chunks

    def _missing(self, number: int) -> "array[int]":
        chunks = self._chunks[number]
        # A chunk names all before it, so whoever stores one has stored those.
        start = next((at for at, one in enumerate(chunks) if one not in self._stored), len(chunks))
        return chunks[start:]

    def _begin(self) -> None:
        self._is_begun = True
        self._names.clear()
        for number in self._chunks:
            self._weights[number] = sum(self._uses[chunk] - 1 for chunk in self._missing(number))
            self._push(number)

    def _push(self, number: int) -> None:
        heapq.heappush(self._heap, (-self._weights[number], number))
