"""The replay of the trace: what it counts, and that a policy cannot find what nobody had."""

import json
from pathlib import Path

import pytest

from benchmarks.eviction import POLICIES, Row, lru, main, measure, replay, tables, whole_blocks
from benchmarks.fleet.trace import BLOCK_TOKENS, Request, read_trace

SHARE = 0.25


def request(at_s: float, *blocks: int, rest: int = 0) -> Request:
    ids = (*blocks, *range(10_000, 10_000 + bool(rest)))
    return Request(at_s, BLOCK_TOKENS * len(blocks) + rest, ids)


def test_only_whole_blocks_are_stored() -> None:
    assert len(whole_blocks(request(0, 1, 2, rest=5))) == 2


def test_blocks_are_found_from_the_beginning_on() -> None:
    requests = [request(0, 1, 2, 3), request(1, 1, 2, 9), request(2, 7, 2, 3)]
    assert replay(requests, float("inf"), lru) == (2 / 9, 0)


def test_a_full_cache_loses_ends_of_what_was_used_longest_ago() -> None:
    requests = [request(0, 1, 2, 3, 4, 5), request(9, 11, 12, 13, 14, 15), request(10, 1, 2)]
    found, evicted = replay(requests, 9, lru)
    assert evicted == 3
    assert found == 2 / 12


def test_no_policy_finds_more_than_there_was() -> None:
    requests = read_trace()[:60]
    rows = measure(requests, parts=("whole",), shares=(SHARE,))
    assert {row.policy for row in rows} == {"infinite", *POLICIES}
    most = next(row.hit_share for row in rows if row.policy == "infinite")
    asked = [name for one in requests for name in whole_blocks(one)]
    assert most <= 1 - len(set(asked)) / len(asked)
    assert all(0 < row.hit_share <= most for row in rows)
    assert rows == measure(requests, parts=("whole",), shares=(SHARE,)), "the same in every run"


def test_a_table_has_a_line_for_each_policy() -> None:
    rows = [Row("whole", "infinite", 1.0, 0.5, 0), Row("whole", "lru", 0.1, 0.25, 7)]
    assert tables(rows).splitlines()[-2:] == ["| infinite | 50.00 % |", "| lru | 25.00 % |"]


def test_rows_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1_000 * n, "input_length": 1_024, "output_length": 1, "hash_ids": [0, n % 7]}
        for n in range(30)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert main(["--trace", str(trace), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["part"] for row in rows} == {"first half", "second half", "whole"}
