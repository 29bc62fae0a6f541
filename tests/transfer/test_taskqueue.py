"""Which span is fetched next."""

from threading import Thread

from objkv.keys.prefix import root_hash
from objkv.testing.clock import ManualClock
from objkv.transfer.job import LoadJob
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan
from objkv.transfer.spans import Span
from objkv.transfer.taskqueue import TaskQueue
from tests.transfer.world import CHUNK, HASHES, NAMESPACE


def job(name: str, chunks: int, *, sync: bool) -> LoadJob:
    moves = tuple(
        LoadMove(ChunkMove(c, 0, HASHES[c], root_hash(NAMESPACE), 0, CHUNK, 0, (3 + c,)), ())
        for c in range(chunks)
    )
    return LoadJob(LoadPlan(name, NAMESPACE, moves, sync), {0: 4}, 5.0, ManualClock())


def spans(count: int) -> list[Span]:
    return [Span(i, i, i + 1, i, 1, last=i == count) for i in range(1, count + 1)]


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
