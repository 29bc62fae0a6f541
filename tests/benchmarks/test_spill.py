"""The benchmark of an agent's disk: its rules write what they say, and its fills are real."""

from pathlib import Path

import pytest

from benchmarks.fleet.trace import Request, read_trace
from benchmarks.spill import RULES, FillBench, replay
from objkv.ops.bench.sample import PAYLOAD_1_MIB, make_samples


@pytest.mark.parametrize("rule", RULES)
def test_every_block_is_somewhere(rule: str) -> None:
    part = read_trace()[:200]
    found = replay(part, 100, 1000, rule)
    total = sum(len(request.blocks) for request in part)
    blocks = len({block for request in part for block in request.blocks})
    assert found.arena + found.disk + found.stores == pytest.approx(1 - blocks / total)


def test_each_rule_writes_less_than_the_one_before() -> None:
    prompts = [Request(0.0, 512, (block,)) for block in (1, 2, 3, 1, 1, 2, 4, 3, 5, 6)]
    written = {rule: replay(prompts, 2, 10, rule).written for rule in RULES}
    assert written == {"all": 0.6, "read": 0.3, "read from the arena": 0.1}


def test_payloads_are_filled_from_disk(tmp_path: Path) -> None:
    bench = FillBench(tmp_path, make_samples(PAYLOAD_1_MIB, 2), has_disk=True)
    assert bench.fill() > 0
    assert bench.fill_cold() > 0
    assert bench.recorder.value("agent_disk_hits") == 4
    bench.core.close(60.0)
