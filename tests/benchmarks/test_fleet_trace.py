"""The trace: what can be reused in it, and what laying copies over each other changes."""

import os
from pathlib import Path

import pytest

from benchmarks.fleet.trace import (
    BLOCK_TOKENS,
    SAMPLE_FILE,
    Population,
    Request,
    arrivals,
    common_blocks,
    pick_conversations,
    read_trace,
    reusable_share,
    span_s,
)
from tests.benchmarks.worlds import SAMPLE

FULL = os.environ.get("OBJKV_FULL_TRACE")


def share_by_walking(requests: list[Request]) -> float:
    """Counted otherwise: a tree of prefixes in which a block is new where its child is missing."""
    root: dict[int, dict] = {}  # type: ignore[type-arg]
    known = blocks = 0
    for request in requests:
        node = root
        for block in request.blocks:
            blocks += 1
            known += block in node
            node = node.setdefault(block, {})
    return known / blocks


def laid(copies: int, overlap: float = 0.0, seed: int = 3) -> list[tuple[int, ...]]:
    found = arrivals(SAMPLE, Population(copies, 1.0, overlap, seed))
    return [arrival.blocks for arrival in found]


def test_equal_ids_are_equal_prefixes() -> None:
    assert reusable_share(SAMPLE) == pytest.approx(share_by_walking(SAMPLE))


@pytest.mark.skipif(FULL is None, reason="OBJKV_FULL_TRACE names no full trace")
def test_an_infinite_cache_has_36_6_percent_of_the_blocks_of_the_full_trace() -> None:
    requests = read_trace(Path(str(FULL)))
    assert len(requests) == 12_031
    assert round(100 * reusable_share(requests), 1) == 36.6
    assert reusable_share(requests) == pytest.approx(share_by_walking(requests))


def test_the_sample_is_small_and_shares_like_the_whole() -> None:
    assert SAMPLE_FILE.stat().st_size <= 120_000
    assert 300 <= len(SAMPLE) <= 500
    assert reusable_share(SAMPLE) == pytest.approx(0.366, abs=0.01)
    assert span_s(SAMPLE) == pytest.approx(3540, abs=30)


def test_one_system_prompt_is_common() -> None:
    assert common_blocks(SAMPLE) == {0}


def test_a_sample_keeps_conversations_whole() -> None:
    lines = SAMPLE_FILE.read_text().splitlines()
    picked = "".join(pick_conversations(lines, 0.3, 1))
    assert 0 < len(picked) < sum(map(len, lines))
    for line in lines:
        first = line[line.index("[") :].split(",")[:2]
        if len(first) == 2:
            same = [other for other in lines if other[other.index("[") :].split(",")[:2] == first]
            assert len({other in picked for other in same}) == 1


def test_turning_the_hour_changes_order_and_not_what_is_shared() -> None:
    def share(prompts: list[tuple[int, ...]]) -> float:
        return 1 - len({b for p in prompts for b in p}) / sum(map(len, prompts))

    one, two = laid(1), laid(2)
    assert len(two) == 2 * len(one)
    assert share(one) == pytest.approx(reusable_share(SAMPLE))
    assert share(two) == pytest.approx(reusable_share(SAMPLE), abs=0.001)


def test_tenants_share_the_system_prompt_only_unless_told_otherwise() -> None:
    blocks = {block for prompt in laid(1) for block in prompt}
    assert len({block for prompt in laid(3) for block in prompt}) == 3 * (len(blocks) - 1) + 1
    assert {block for prompt in laid(3, overlap=1.0) for block in prompt} == blocks


def test_arrivals_come_in_order_and_are_the_same_for_the_same_seed() -> None:
    first = arrivals(SAMPLE, Population(2, 1.5, 0.2, 7))
    assert first == arrivals(SAMPLE, Population(2, 1.5, 0.2, 7))
    assert first != arrivals(SAMPLE, Population(2, 1.5, 0.2, 8))
    times = [arrival.at_s for arrival in first]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 1.5 * span_s(SAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "no json",
        f'{{"timestamp": 0, "input_length": {BLOCK_TOKENS + 1}, "hash_ids": [1]}}',
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit, match="not a request trace"):
        read_trace(path)
