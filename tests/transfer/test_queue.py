"""Which span is fetched next, and how payloads are cut into them."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event, Lock, Thread, get_ident

import pytest
from hypothesis import given
from hypothesis import strategies as st
from objkv.transfer.loading.queue import FetchSpan, TaskQueue, opening_bytes, remaining, span_count

from objkv.codec.payload import CODECS, LayerSpec, encode, payload_bytes_max, read_header
from objkv.index.memory import MemoryIndex
from objkv.keys.prefix import root_hash
from objkv.stores.base import Arrived
from objkv.stores.memory import MemoryStore
from objkv.testing.clock import ManualClock
from objkv.transfer.loading import queue as taskqueue
from objkv.transfer.loading.job import LoadJob
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan
from tests.codec.payloads import CLAIM, PROVENANCE, layer_lists, pages_of
from tests.support.paged_cache import CHUNK, HASHES, NAMESPACE, PATIENCE_S, Replica, wait_until

# Which span is fetched next, and by how many threads.


def job(name: str, chunks: int, *, sync: bool) -> LoadJob:
    moves = tuple(
        LoadMove(ChunkMove(c, 0, HASHES[c], root_hash(NAMESPACE), 0, CHUNK, 0, (3 + c,)), ())
        for c in range(chunks)
    )
    plan = LoadPlan(name, NAMESPACE, moves, sync)
    return LoadJob(plan, [range(4)] * len(moves), 5.0, ManualClock())


def spans(count: int) -> list[FetchSpan]:
    return [FetchSpan(i, i, i + 1, i, 1, last=i == count) for i in range(1, count + 1)]


def drained(queue: TaskQueue) -> list[tuple[str, int, int]]:
    out = []
    while len(queue):
        task = queue.take()
        assert task is not None
        out.append((task[0].plan.request_id, task[1], 0 if task[2] is None else task[2].number))
    return out


def test_first_spans_of_all_chunks_come_before_the_second_of_any() -> None:
    queue = TaskQueue(16)
    within = job("within", 3, sync=True)
    queue.add(job("later", 1, sync=False))
    queue.add(within)
    task = queue.take()
    assert task is not None
    queue.add_spans(within, 0, spans(2))
    queue.add(job("too", 1, sync=True))
    assert drained(queue) == [
        ("within", 1, 0),
        ("within", 2, 0),
        ("too", 0, 0),
        ("within", 0, 1),
        ("within", 0, 2),
        ("later", 0, 0),
    ]


def test_what_goes_on_takes_no_room_from_what_begins() -> None:
    queue = TaskQueue(2)
    first = job("a", 3, sync=True)
    assert queue.add(first) == 2
    assert queue.take() is not None
    queue.add_spans(first, 0, spans(3))
    assert queue.add(job("b", 3, sync=True)) == 1
    assert queue.add(job("c", 1, sync=False)) == 0


def test_whoever_waits_for_a_task_is_told_of_the_end() -> None:
    queue, got = TaskQueue(2), [object()]
    waiting = Thread(target=lambda: got.append(queue.take()))
    waiting.start()
    queue.close()
    waiting.join()
    assert got[1] is None
    assert queue.add(job("a", 1, sync=True)) == 0
    queue.add_spans(job("a", 1, sync=True), 0, spans(1))
    assert len(queue) == 0


class Crew:
    """Threads that take tasks and tell which of them did."""

    def __init__(self, queue: TaskQueue, threads: int, work: Callable[[], float]) -> None:
        self.took: list[int] = []
        self._queue = queue
        self._work = work
        self._threads = [Thread(target=self._run, args=(n,), daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while self._queue.take() is not None:
            self.took.append(number)
            self._queue.finish(self._work())

    def join(self) -> None:
        self._queue.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_the_others_join_when_nobody_gets_on() -> None:
    queue, released = TaskQueue(1_000, eager=1), Event()

    def stuck() -> float:
        released.wait(PATIENCE_S)
        return 0.0

    crew = Crew(queue, 4, stuck)
    for _ in range(2):
        queue.add(job("a", 3, sync=False))
    wait_until(lambda: len(crew.took) == 4)
    assert sorted(crew.took) == [0, 1, 2, 3]
    released.set()
    wait_until(lambda: len(crew.took) == 6)
    crew.join()


@pytest.mark.parametrize(("processors", "at_once"), [(1, 1), (2, 1), (6, 3), (64, 8)])
def test_half_the_processors_are_used_at_once(
    monkeypatch: pytest.MonkeyPatch, processors: int, at_once: int
) -> None:
    monkeypatch.setattr(taskqueue, "_processors", lambda: processors)
    queue, released = TaskQueue(1_000), Event()
    queue._usual_s = 1e6  # nobody is ever late
    crew = Crew(queue, 8, lambda: float(released.wait(PATIENCE_S)))
    for _ in range(4):
        queue.add(job("a", 2, sync=False))
    wait_until(lambda: len(crew.took) == at_once)
    time.sleep(0.05)
    assert len(crew.took) == at_once
    released.set()
    wait_until(lambda: len(crew.took) == 8)
    crew.join()


def test_one_that_hangs_does_not_slow_the_others_down() -> None:
    queue, released, hangs = TaskQueue(1_000, eager=1), Event(), Event()

    def work() -> float:
        if not hangs.is_set():
            hangs.set()
            released.wait(PATIENCE_S)
        return 0.25  # nobody else is late before half a second

    crew = Crew(queue, 4, work)
    queue.add(job("a", 1, sync=False))
    wait_until(hangs.is_set)
    queue._usual_s = 0.25
    started = time.monotonic()
    for _ in range(100):
        queue.add(job("b", 3, sync=False))
    wait_until(lambda: len(crew.took) == 301)
    # If each had to wait for the one that hangs to be late, 150 s.
    assert time.monotonic() - started < 300 * 0.5 / 2
    released.set()
    crew.join()


def test_who_is_slow_to_finish_goes_on_at_once() -> None:
    """Of a store that takes its time as many threads as there are work all the time."""
    queue, most, working, lock = TaskQueue(1_000, eager=1), [], set[int](), Lock()

    def work() -> float:
        with lock:
            working.add(get_ident())
            most.append(len(working))
        time.sleep(0.02)
        with lock:
            working.discard(get_ident())
        return 0.002

    crew = Crew(queue, 4, work)
    for _ in range(20):
        queue.add(job("a", 3, sync=False))
    wait_until(lambda: len(crew.took) == 60)
    crew.join()
    assert statistics.mean(most[8:-4]) > 2.5


@pytest.mark.parametrize("seed", range(3))
def test_no_task_is_left_lying_whoever_waits_for_whom(seed: int) -> None:
    source = random.Random(seed)
    queue = TaskQueue(1_000, eager=source.choice([1, 2]))

    def work() -> float:
        time.sleep(source.choice([0, 0, 0.0005, 0.002, 0.01]))
        return source.choice([0.0, 0.001])

    crew, added = Crew(queue, 6, work), 0
    for _ in range(150):
        added += queue.add(job("a", source.randint(1, 3), sync=False))
        time.sleep(source.choice([0, 0, 0.001, 0.004]))
    wait_until(lambda: len(crew.took) == added)
    crew.join()


def test_loads_between_steps_do_not_starve_behind_endless_ones_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(taskqueue, "monotonic", clock)
    queue = TaskQueue(1_000, eager=9, overdue_s=10)
    queue.add(job("between", 3, sync=False))
    taken = []
    for _ in range(100):  # there are always some within
        queue.add(job("within", 2, sync=True))
        task = queue.take()
        assert task is not None
        taken.append(task[0].plan.request_id)
        clock.advance(1)
        queue.finish(0)
    assert taken[:10] == ["within"] * 10
    assert taken[10:13] == ["between"] * 3
    assert set(taken[13:]) == {"within"}


def test_overdue_loads_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(taskqueue, "monotonic", clock)
    queue = TaskQueue(1_000, eager=9, overdue_s=10)
    queue.add(job("between", 4, sync=False))
    queue.add(job("within", 4, sync=True))
    clock.advance(11)
    taken: list[str] = []
    done = Event()

    def work() -> None:
        task = queue.take()
        assert task is not None
        taken.append(task[0].plan.request_id)
        assert done.wait(PATIENCE_S)
        queue.finish(0)

    threads = [Thread(target=work) for _ in range(4)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: len(taken) == number)  # type: ignore[misc]
    assert taken == ["between", "within", "within", "within"]
    assert queue.hanging(0) == 0
    clock.advance(31)
    assert queue.hanging(30) == 4
    done.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert queue.hanging(0) == 0


# What the model is waiting for is fetched before what it is not waiting for.


class GatedStore(MemoryStore):
    """Each payload is answered when its gate is open; remembers which were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, Event] = {}
        self.asked: list[str] = []

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        self.asked.append(key)
        assert self.gates[key].wait(2 * PATIENCE_S)
        return super().get_into(key, buffer, arrived, start)


def test_a_load_within_the_step_does_not_wait_behind_loads_between_steps() -> None:
    store = GatedStore()
    replica = Replica(store, MemoryIndex(), seed=1)
    replica.save(range(4))
    first, rest = Event(), Event()
    for chunk in range(4):
        store.gates[replica.path(chunk)] = first if chunk < 2 else rest
    replica.loader.submit(replica.load_plan(range(4), 9))
    wait_until(lambda: len(store.asked) == 2)  # one a thread
    within = replace(replica.load_plan(range(2), 20, sync=True), request_id="within")
    replica.loader.submit(within)
    first.set()
    (outcome,) = replica.loader.take_finished(sync=True)
    rest.set()
    assert not outcome.failed
    assert not replica.outcome().failed


# How payloads are cut into requests.


MIB = 1 << 20


@given(layer_lists, st.sampled_from(CODECS), st.integers(1, 5))
def test_spans_are_the_payload_once_and_the_first_brings_its_share_of_layers(
    layers: list[LayerSpec], codec: str, count: int
) -> None:
    payload = encode(CLAIM, layers, pages_of(layers), codec=codec, provenance=PROVENANCE)
    header = read_header(payload)
    nbytes = opening_bytes(layers, count, tokens=0)
    whole = [f for f in header.frames if f.offset + f.nbytes <= nbytes]
    assert header.data_start <= nbytes <= payload_bytes_max(layers)
    assert len(whole) * count >= len(layers)
    spans = remaining(header, len(whole), count)
    assert 1 <= len(spans) <= count
    assert [span.number for span in spans] == list(range(1, len(spans) + 1))
    assert [span.last for span in spans] == [False] * (len(spans) - 1) + [True]
    at, layer = header.nbytes if len(whole) == len(layers) else 0, len(whole)
    at = at or header.frames[layer].offset
    for span in spans:
        assert (span.first, span.start) == (layer, at)
        layer, at = span.end, at + span.nbytes
    assert (layer, at) == (len(layers), header.nbytes)


def test_a_small_payload_is_one_request_and_a_large_one_at_most_so_many() -> None:
    def spans(nbytes: int, layers: int = 32) -> int:
        return span_count(nbytes, layers, spans_max=4, span_bytes_min=MIB)

    assert [spans(n) for n in (0, MIB - 1, MIB, 2 * MIB, 64 * MIB)] == [1, 1, 1, 2, 4]
    assert spans(64 * MIB, layers=2) == 2
