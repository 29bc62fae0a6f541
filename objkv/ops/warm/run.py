"""Runs ``warm`` with engines: sends prompts, waits until they are stored, and retries.

A prompt is done when the index has all its chunks, not when it is answered: replicas save in the
background and may drop saves. The owner's thread does everything except the requests. It may be
interrupted at any time, because a later run skips stored prompts.
"""

import heapq
import os
import tempfile
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

from objkv.errors import ConfigError, StoreError
from objkv.ops.warm.fleet import PrefillFleet, Seat
from objkv.ops.warm.lookup import Found, PromptLookup
from objkv.ops.warm.prefill import PrefillError, PrefillReply, PrefillRequest
from objkv.ops.warm.report import EndpointReport, WarmReport


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt to compute next."""

    number: int
    root: bytes
    """The root of its tree; prompts with the same root should go to the same engine."""
    missing: int
    """Chunks not stored so far; 0 if other prompts have all of them."""


class Order:
    """Orders prompts so that shared prefixes are computed once.

    The prompts' chunks form a tree. A prompt in progress claims its missing chunks until they are
    stored; another prompt that needs a claimed chunk waits. So the first prompt with a shared
    prefix runs alone, and the others load its chunks. Prompts with the most shared chunks go first.
    For one thread. Uses about 200 bytes per distinct chunk.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, int] = {}
        self._uses = array("I")
        self._chunks: dict[int, array[int]] = {}
        self._roots: dict[int, bytes] = {}
        self._stored: set[int] = set()
        self._claims: dict[int, int] = {}
        """The prompt that computes each claimed chunk."""
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        self._heap: list[tuple[int, int]] = []
        self._weights: dict[int, int] = {}
        self._is_begun = False

    def add(self, number: int, chunks: Sequence[bytes], stored: int) -> None:
        """Add a prompt whose first ``stored`` chunks are stored. Add all prompts before the first
        ``next``."""
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
        """Return the next prompt and claim its missing chunks; None if all wait or none is left."""
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
        """End a prompt that is now stored or has failed for good."""
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
        # A chunk's hash covers all chunks before it, so those are stored too.
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


_TOKEN_BYTES = 4


class TokenSpool:
    """Token ids of many prompts in an unnamed temporary file. Safe from many threads."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``close``
        self._lock = Lock()
        self._places: list[tuple[int, int]] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, tokens: Sequence[int]) -> int:
        """Store the ids and return their number for ``read``."""
        encoded = array("I", tokens)
        assert encoded.itemsize == _TOKEN_BYTES
        with self._lock:
            os.pwrite(self._file.fileno(), encoded.tobytes(), self._end)
            self._places.append((self._end, len(encoded)))
            self._end += len(encoded) * _TOKEN_BYTES
            return len(self._places) - 1

    def read(self, number: int) -> "array[int]":
        """Return the ids added as ``number``."""
        start, length = self._places[number]
        tokens = array("I")
        tokens.frombytes(os.pread(self._file.fileno(), length * _TOKEN_BYTES, start))
        return tokens

    def length(self, number: int) -> int:
        """Return the number of ids added as ``number``."""
        return self._places[number][1]

    def close(self) -> None:
        """Delete the file. Idempotent."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class WarmLimits:
    """Limits of attempts and times."""

    attempts_max: int = 4
    """Attempts per prompt, not counting busy answers."""
    busy_max: int = 100
    """Busy answers per prompt."""
    save_s: float = 60.0
    """Time from the answer until the prompt is stored; afterwards it is sent again."""
    gone_s: float = 120.0
    """The run ends when no prefiller has answered for this time."""
    pause_s: float = 0.05
    """Pause between lookups of pending saves; grows to ten times this while nothing changes."""


@dataclass(frozen=True, slots=True)
class Task:
    """A tokenized prompt. Its position in the list is the number of its tokens in the spool."""

    name: str
    salt: str | None
    adapter: str | None


@dataclass(slots=True)
class _Under:
    """A prompt in progress."""

    turn: Turn
    attempts: int = 0
    busy: int = 0
    stored: int = 0
    """Chunks stored before it was sent."""
    saved_by_s: float = 0.0


Tell = Callable[[WarmReport], None]
_SAVING_FACTOR = 4
"""Answered prompts with pending saves, per concurrent request."""
_FINDERS, _BATCH = 8, 512
"""Threads for index lookups, and prompts looked up between two progress reports."""
_LOOK_S, _BREATH_S = 1.0, 0.01
"""The longest wait of a round, and the shortest one before prefillers are considered again."""


class Warming:
    """One run. ``report`` is always up to date."""

    def __init__(
        self,
        tasks: Sequence[Task],
        spool: TokenSpool,
        fleet: PrefillFleet,
        lookup: PromptLookup,
        patience: WarmLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_progress: Tell = lambda report: None,
    ) -> None:
        self._tasks = tasks
        self._spool = spool
        self._fleet = fleet
        self._lookup = lookup
        self._patience = patience
        self._clock = clock
        self._tell = on_progress
        self._order = Order()
        self._under: dict[int, _Under] = {}
        self._again: deque[int] = deque()
        self._asking: dict[Future[PrefillReply], tuple[int, Seat]] = {}
        self._checking: dict[Future[None], Seat] = {}
        self._saving: list[int] = []
        self._finders = ThreadPoolExecutor(_FINDERS, thread_name_prefix="objkv-warm-find")
        self._looked_s = self._paused_s = 0.0
        self.report = WarmReport("engine", lookup.namespace, lookup.identity.model)
        self.report.prompts = len(tasks)

    def run(self) -> None:
        """Run until every prompt is stored or has failed, or no prefiller answers any more.

        An interrupt or an unreachable index also ends the run, and ``report`` shows it.
        """
        started_s = self._clock()
        # One more per prefiller, for checks while it is down.
        threads = self._fleet.at_once + len(self._fleet.seats)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="objkv-warm")
        self.report.ending = "interrupted"  # unless it gets to the end
        try:
            self._look_up()
            while self._advance(pool):
                self._tell(self.report)
        except KeyboardInterrupt:
            with suppress(StoreError):  # answered prompts may be stored by now
                self._look()
        except StoreError as exc:
            self.report.ending, self.report.why = "unreachable", str(exc)
        finally:
            for seat in self._fleet.seats:
                seat.asker.close()
            pool.shutdown(wait=True, cancel_futures=True)
            self._finders.shutdown(wait=True, cancel_futures=True)
            self.report.seconds = self._clock() - started_s
            self.report.endpoints = [_told(seat) for seat in self._fleet.seats]
            self.report.left = self.report.prompts - self.report.done
            self._tell(self.report)

    def _look_up(self) -> None:
        """Look up all prompts and order those that are not stored."""
        report = self.report
        report.prompt_tokens = sum(map(self._spool.length, range(len(self._tasks))))
        for start in range(0, len(self._tasks), _BATCH):
            numbers = range(start, min(start + _BATCH, len(self._tasks)))
            every = self._finders.map(self._find, numbers)
            for number, (hashes, found) in zip(numbers, every, strict=True):
                if not hashes:
                    report.short += 1
                elif found.is_all:
                    report.stored_before += 1
                else:
                    self._order.add(number, hashes, found.usable)
            self._tell(report)

    def _find(self, number: int) -> tuple[list[bytes], Found]:
        task = self._tasks[number]
        hashes = self._lookup.hashes(self._spool.read(number), task.salt, task.adapter)
        return hashes, self._lookup.find(hashes)

    def _advance(self, pool: ThreadPoolExecutor) -> bool:
        """Run one round; return False at the end."""
        self._check(pool)
        self._ask_more(pool)
        if self._order.is_empty:
            self.report.ending = "complete"
            return False
        if self._fleet.gone_s() > self._patience.gone_s and not self._saving:
            self.report.ending = "unreachable"
            errors = [seat.last_error for seat in self._fleet.seats]
            self.report.why = f"no endpoint answers any more: {'; '.join(errors)}"
            return False
        pause_s = self._paused_s if self._saving else self._fleet.rest_s() + _BREATH_S
        if self._asking or self._checking:
            under_way: set[Future[Any]] = {*self._asking, *self._checking}
            # With free prefillers and no pending saves, only an answer can start further work.
            limit_s = _LOOK_S if self._fleet.has_room() and not self._saving else pause_s
            ended, _ = wait(under_way, min(limit_s, _LOOK_S), FIRST_COMPLETED)
            for future in [future for future in self._asking if future in ended]:
                self._take(future)
        else:
            time.sleep(min(pause_s, _LOOK_S))
        if self._clock() - self._looked_s >= self._paused_s:
            self._look()
        return True

    def _check(self, pool: ThreadPoolExecutor) -> None:
        """Check the prefillers that are down."""
        for seat in self._fleet.to_check():
            self._checking[pool.submit(seat.asker.check)] = seat
        for future in [future for future in self._checking if future.done()]:
            seat = self._checking.pop(future)
            try:
                future.result()
            except (PrefillError, ConfigError) as exc:  # ConfigError: it serves another model now
                self._fleet.failed(seat, PrefillError("down", str(exc)))
            else:
                self._fleet.passed(seat)

    def _ask_more(self, pool: ThreadPoolExecutor) -> None:
        most = _SAVING_FACTOR * self._fleet.at_once
        while self._fleet.has_room():
            if self._again:
                under = self._under[self._again.popleft()]
            elif len(self._saving) >= most or (turn := self._order.next()) is None:
                return
            elif not turn.missing:
                self.report.warmed += 1
                self.report.shared += 1
                continue
            else:
                _, found = self._find(turn.number)
                under = _Under(turn, stored=found.usable)
                self._under[turn.number] = under
                if found.is_all:  # stored by another client meanwhile
                    self._finish(under, found)
                    continue
            seat = self._fleet.take(under.turn.root)
            future = pool.submit(self._ask, under.turn.number, seat)
            self._asking[future] = under.turn.number, seat

    def _ask(self, number: int, seat: Seat) -> PrefillReply:
        task = self._tasks[number]
        return seat.asker.ask(PrefillRequest(self._spool.read(number), task.salt, task.adapter))

    def _take(self, future: Future[PrefillReply]) -> None:
        number, seat = self._asking.pop(future)
        under = self._under[number]
        try:
            reply = future.result()
        except PrefillError as exc:
            self._fleet.failed(seat, exc)
            self._retry(under, exc)
            return
        except ConfigError as exc:  # the API key is no longer accepted
            error = PrefillError("down", str(exc))
            self._fleet.failed(seat, error)
            self._retry(under, error)
            return
        tokens = self._spool.length(number)
        self._fleet.answered(seat, tokens)
        self.report.asked_tokens += tokens
        if reply.cached_tokens is not None:
            self.report.cached_tokens = (self.report.cached_tokens or 0) + reply.cached_tokens
        under.saved_by_s = self._clock() + self._patience.save_s
        self._saving.append(number)
        self._paused_s = self._patience.pause_s

    def _retry(self, under: _Under, error: PrefillError) -> None:
        if error.trouble == "busy":
            under.busy += 1
        else:
            under.attempts += 1
        patience = self._patience
        spent = under.attempts >= patience.attempts_max or under.busy >= patience.busy_max
        if error.trouble == "refused" or (spent and error.trouble != "down"):
            self._fail(under, str(error))
        elif spent and not all(seat.is_down for seat in self._fleet.seats):
            # Other prefillers are up, so this prompt is the cause.
            self._fail(under, str(error))
        else:
            self.report.retries += 1
            self._again.append(under.turn.number)

    def _fail(self, under: _Under, why: str) -> None:
        number = under.turn.number
        self.report.fail(self._tasks[number].name, why)
        del self._under[number]
        self._order.end(number, stored=False)

    def _look(self) -> None:
        """Look up the answered prompts and finish those that are stored."""
        self._looked_s = self._clock()
        left = []
        every = list(self._finders.map(self._find, self._saving))
        for number, (_, found) in zip(self._saving, every, strict=True):
            under = self._under.get(number)
            if under is None:  # after an interrupt
                continue
            if found.is_all:
                self._finish(under, found)
            elif self._clock() < under.saved_by_s:
                left.append(number)
            else:
                count = f"{found.usable} of {found.chunks} chunks were stored"
                why = f"{count} {self._patience.save_s:.0f} s after it was computed"
                self._retry(under, PrefillError("failed", why))
        if len(left) == len(self._saving):
            self._paused_s = min(1.5 * self._paused_s, 10 * self._patience.pause_s)
        self._saving = left

    def _finish(self, under: _Under, found: Found) -> None:
        number = under.turn.number
        self.report.warmed += 1
        self.report.saved_chunks += found.usable - under.stored
        self.report.saved_bytes += sum(found.nbytes[under.stored : found.usable])
        del self._under[number]
        self._order.end(number, stored=True)


def _told(seat: Seat) -> EndpointReport:
    return EndpointReport(
        seat.asker.name,
        seat.answered,
        seat.tokens,
        seat.errors,
        seat.is_down,
        seat.last_error,
    )
