"""Where tokens came from is counted once for each time that vLLM admits a request."""

from types import SimpleNamespace
from typing import Any

from objkv.connector.kv.scheduler import HitCounters
from objkv.index.base import ShardRecord
from objkv.telemetry import MemoryRecorder
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan

SIZE = 64


def request(tokens: int, name: str = "r") -> Any:
    return SimpleNamespace(request_id=name, num_tokens=tokens)


def record(*, hot: bool) -> ShardRecord:
    return ShardRecord(100, 80, "none", hot, "0" * 32, 1)


def load(chunk: int, *, hot: bool, group: int = 0) -> LoadMove:
    start = chunk * SIZE
    names = bytes([chunk]) * 20, bytes([chunk]) * 20
    move = ChunkMove(chunk, group, *names, start, start + SIZE, 0, (chunk + 1,))
    return LoadMove(move, (("0.L0-1_H0-1", record(hot=hot)),))


def plan(*moves: LoadMove) -> LoadPlan:
    return LoadPlan("r", "n" * 32, moves, sync=False)


def test_a_query_is_counted_once_however_often_vllm_asks() -> None:
    recorder = MemoryRecorder()
    hits, one = HitCounters(recorder), request(300)
    for _ in range(5):
        hits.asked("r", 64)
    hits.given(one)
    assert recorder.drain() == {"queries": 1, "query_tokens": 300, "local_hit_tokens": 64}


def test_blocks_given_again_after_a_load_are_no_new_query() -> None:
    recorder = MemoryRecorder()
    hits, one = HitCounters(recorder), request(300)
    hits.asked("r", 0)
    hits.given(one)
    hits.given(one)
    assert recorder.value("queries") == 1


def test_a_request_that_was_preempted_is_a_query_again() -> None:
    recorder = MemoryRecorder()
    hits, one = HitCounters(recorder), request(300)
    for computed in (0, 128):
        hits.asked("r", computed)
        hits.given(one)
    assert recorder.drain() == {"queries": 2, "query_tokens": 600, "local_hit_tokens": 128}


def test_a_request_that_ends_before_it_is_admitted_is_forgotten() -> None:
    recorder = MemoryRecorder()
    hits = HitCounters(recorder)
    hits.asked("r", 0)
    hits.ended("r")
    hits.given(request(300))
    assert recorder.drain() == {}
    assert hits._asked == {}


def test_tokens_to_load_are_hot_or_in_bulk_and_nothing_else() -> None:
    recorder = MemoryRecorder()
    moves = load(0, hot=True), load(1, hot=False), load(2, hot=True)
    HitCounters(recorder).planned(plan(*moves), 32, 3 * SIZE)
    assert recorder.drain() == {
        "hits": 1,
        "hit_tokens": 160,
        "hit_hot_tokens": 32 + 64,
        "hit_bulk_tokens": 64,
    }


def test_a_chunk_is_hot_when_all_its_groups_are() -> None:
    recorder = MemoryRecorder()
    moves = load(0, hot=True), load(0, hot=False, group=1), load(1, hot=True)
    HitCounters(recorder).planned(plan(*moves), 0, 2 * SIZE)
    assert recorder.value("hit_hot_tokens") == SIZE
    assert recorder.value("hit_bulk_tokens") == SIZE
