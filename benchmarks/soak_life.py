"""The random life of one replica: requests that look up, load, compute, save, and are aborted or
preempted, while every block's contents are compared with the model's."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Event, Thread

from benchmarks.soak_prompts import BLOCKS, CHUNK, CHUNKS_MAX, GROUPS, Documents, Prompt, truth
from benchmarks.soak_replica import POISON, SLABS, Replica, Tables
from objkv.cache.lookup import Records
from objkv.transfer.plan import LoadOutcome

BLOCKS_OF_REPLICA = 18 * BLOCKS
REQUESTS_MAX = 8
STUCK_S = 60.0
"""A load has its own deadline, far below."""
ABORTS_OF_1000, PREEMPTIONS_OF_1000, RESTARTS_OF_100_000 = 12, 12, 40
"""Per request and step; restarts per step."""


@dataclass
class _Request:
    name: str
    prompt: Prompt
    tables: Tables = ()
    loading: int = 0
    """Chunks that are being loaded."""
    steps_left: int = -1
    """Of decoding; below 0 while not computed."""
    aborted: bool = False
    asked_s: float = field(default_factory=time.monotonic)


class Life:
    """Lives in a thread of its own until ``end``; starts a new replica now and then."""

    def __init__(
        self, name: str, open_replica: Callable[[], Replica], documents: Documents
    ) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        """What must never be; empty, or the soak has failed."""
        self.stepped_s = time.monotonic()
        self._open = open_replica
        self._documents = documents
        self._random = random.Random(name)
        self._stop = Event()
        self._numbers = iter(range(1 << 60))
        self._begin()
        self._thread = Thread(target=self._run, name=f"soak-{name}", daemon=True)
        self._thread.start()

    def end(self, wait_s: float) -> bool:
        """Ask it to end; whether it did in time."""
        self._stop.set()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _begin(self) -> None:
        self.replica = self._open()
        self._requests: dict[str, _Request] = {}
        self._free = tuple(list(range(1, 1 + BLOCKS_OF_REPLICA)) for _ in GROUPS)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step()
                if self._random.randrange(100_000) < RESTARTS_OF_100_000:
                    self._close()
                    self.counts["restarts"] += 1
                    self._begin()
            self._settle()
            self._close()
        except BaseException as exc:
            self._say_wrong(f"the replica raised {type(exc).__name__}: {exc}")
            raise

    def _step(self) -> None:
        self.stepped_s = time.monotonic()
        self.counts["steps"] += 1
        if len(self._requests) < REQUESTS_MAX and self._random.random() < 0.3:
            name = f"{self.name}-{next(self._numbers)}"
            chunks = self._random.randint(1, CHUNKS_MAX)
            whole = self._random.choice(self._documents.prompts)
            cut = Prompt(whole.tokens[: chunks * CHUNK], whole.hashes[:chunks])
            self._requests[name] = _Request(name, cut)
        for request in list(self._requests.values()):
            self._advance(request)
        for outcome in self.replica.step_layers():
            self._loaded(outcome)
        for outcome in self.replica.loader.take_finished(sync=False):
            self._loaded(outcome)
        time.sleep(self._random.choice((0.0, 0.001, 0.002)))

    def _advance(self, request: _Request) -> None:
        if not request.aborted and self._random.randrange(1000) < ABORTS_OF_1000:
            self._abort(request)
        elif request.steps_left > 0:
            request.steps_left -= 1
            if self._random.randrange(1000) < PREEMPTIONS_OF_1000:
                self._preempt(request)
        elif request.steps_left == 0:
            if self.replica.saver.left_device(request.name):
                self.counts["finished"] += 1
                self._leave(request)
        elif not request.loading:
            self._start(request)

    def _start(self, request: _Request) -> None:
        if len(self._free[0]) < len(request.prompt) * BLOCKS:
            running = [r for r in self._requests.values() if r.steps_left > 0]
            if running and self._random.random() < 0.05:
                self._preempt(self._random.choice(running))
            return
        found = self.replica.match(request.name, request.prompt)
        if found is None:
            if time.monotonic() - request.asked_s > STUCK_S:
                self._say_wrong(f"{request.name}: no answer of the lookup in {STUCK_S} s")
            return
        self.counts["lookups"] += 1
        self.replica.lookups.forget(request.name)
        matched, records = found
        request.tables = self._allocate(len(request.prompt) * BLOCKS)
        if matched:
            self._load(request, records[:matched])
        else:
            self._compute(request, 0)

    def _load(self, request: _Request, records: Records) -> None:
        request.loading = len(records)
        request.asked_s = time.monotonic()
        sync = self._random.random() < 0.2
        self.replica.load(request.name, request.prompt, request.tables, records, sync=sync)
        self.counts["loads"] += 1

    def _loaded(self, outcome: LoadOutcome) -> None:
        request = self._requests.get(outcome.request_id)
        if request is None or not request.loading:
            self._say_wrong(f"{outcome.request_id}: an outcome that nobody waits for")
            return
        self.replica.note(outcome)
        good = request.loading
        for chunk in reversed(range(request.loading)):
            ids = [b for table in request.tables for b in _of_chunk(table, chunk)]
            if outcome.failed_blocks.intersection(ids):
                good = chunk
        self.counts["load_failures"] += good < request.loading
        self._check(request, range(good), "loaded")
        self.counts["chunks_loaded"] += good
        request.loading = 0
        if request.aborted:
            self._leave(request)
        else:
            self._compute(request, good)

    def _compute(self, request: _Request, first: int) -> None:
        """What the model does with chunks that were not loaded, and the saves that follow."""
        chunks = range(first, len(request.prompt))
        for chunk in chunks:
            for g, table in enumerate(request.tables):
                ids = _of_chunk(table, chunk)
                for cache, pages in zip(
                    self.replica.caches[g], truth(request.prompt.hashes[chunk], g), strict=True
                ):
                    cache[ids] = pages
        if chunks:
            dropped = self.replica.save(request.name, request.prompt, request.tables, chunks)
            self.counts["chunks_computed"] += len(chunks)
            self.counts["saves_dropped"] += dropped
        request.steps_left = self._random.randrange(60)

    def _abort(self, request: _Request) -> None:
        self.counts["aborts"] += 1
        self.replica.lookups.forget(request.name)
        if request.loading:  # its blocks are not free before the outcome says so
            request.aborted = True
            self.replica.loader.cancel(request.name)
        else:
            self.replica.saver.forget(request.name)
            self._leave(request)

    def _preempt(self, request: _Request) -> None:
        """Its blocks change hands at once; it begins anew."""
        self.counts["preemptions"] += 1
        self.replica.saver.fence()
        self._release(request)
        request.steps_left = -1
        request.asked_s = time.monotonic()

    def _leave(self, request: _Request) -> None:
        self._release(request)
        del self._requests[request.name]

    def _allocate(self, count: int) -> Tables:
        tables = []
        for g, free in enumerate(self._free):
            self._random.shuffle(free)
            ids = [free.pop() for _ in range(count)]
            tables.append(ids)
            if any(not bool((cache[ids] == POISON).all()) for cache in self.replica.caches[g]):
                self._say_wrong(f"{self.name}: blocks were written while nobody had them")
        return tuple(tables)

    def _release(self, request: _Request) -> None:
        if request.steps_left >= 0:
            self._check(request, range(len(request.prompt)), "held")
        for g, table in enumerate(request.tables):
            for cache in self.replica.caches[g]:
                cache[table] = POISON
            self._free[g].extend(table)
        request.tables = ()

    def _check(self, request: _Request, chunks: Iterable[int], what: str) -> None:
        for chunk in chunks:
            for g, table in enumerate(request.tables):
                ids = _of_chunk(table, chunk)
                pages = truth(request.prompt.hashes[chunk], g)
                for layer, cache in enumerate(self.replica.caches[g]):
                    if not bool((cache[ids] == pages[layer]).all()):
                        place = f"chunk {chunk}, group {g}, layer {layer}"
                        self._say_wrong(f"{request.name}: {place} is wrong, {what}")
            self.counts["chunks_checked"] += 1

    def _settle(self) -> None:
        """Abort what is left, and see that nothing is held."""
        for request in list(self._requests.values()):
            if not request.aborted:
                self._abort(request)
        until = time.monotonic() + STUCK_S
        while self._requests and time.monotonic() < until:
            self._step_outcomes()
        if self._requests:
            self._say_wrong(f"{self.name}: no outcome for {sorted(self._requests)}")
        if not self.replica.saver.drain(STUCK_S):
            self._say_wrong(f"{self.name}: saves did not end: {self.replica.saver!r}")

    def _step_outcomes(self) -> None:
        self.stepped_s = time.monotonic()
        for sync in (True, False):
            for outcome in self.replica.loader.take_finished(sync=sync):
                self._loaded(outcome)
        time.sleep(0.005)

    def _close(self) -> None:
        """Close in the middle of everything; from then on no block may change."""
        replica = self.replica
        replica.close()
        for group in replica.caches:
            for cache in group:
                cache.fill_(POISON)
        until = time.monotonic() + STUCK_S
        while any(leased_of(replica)) and time.monotonic() < until:
            self.stepped_s = time.monotonic()
            time.sleep(0.01)
        if any(leased_of(replica)):
            self._say_wrong(f"{self.name}: still leased: {replica.slabs} {replica.loads}")
        if any(not bool((c == POISON).all()) for group in replica.caches for c in group):
            self._say_wrong(f"{self.name}: blocks were written after the replica was closed")
        for name, value in replica.recorder.drain().items():
            if not name.endswith(("_sum", "_max")):
                self.counts[f"objkv_{name}"] += int(value)

    def _say_wrong(self, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 20:
            self.wrong.append(what)


def leased_of(replica: Replica) -> list[int]:
    """The payloads and the slabs that are leased. That none is lost or given back twice is asserted
    here and, whenever a slab comes back, by the pool itself."""
    assert replica.loads.inside.core.residents.check()
    assert replica.slabs.total == SLABS
    return [replica.loads.leased, replica.slabs.leased]


def _of_chunk(table: list[int], chunk: int) -> list[int]:
    return table[chunk * BLOCKS : (chunk + 1) * BLOCKS]
