"""Ranks in processes of their own, without vLLM: a stage skips a step as a whole or not at all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.connector.handoff.world import LAYERS, Engine, Shape, same, step

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


def run(folder: Path, rank: int, kind: str) -> dict[str, Any]:
    """One of two ranks receives before anything was sent, after everything was, and after the
    second rank lost a payload."""
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    shape, mine = Shape(start_layer=rank, end_layer=1 + 2 * rank), "L1-3"
    if kind == "tp":
        shape, mine = Shape(rank, 2, 0, LAYERS), "H2-4"
    nobody: Any = None
    engine = Engine(folder, shape, rank, agree=nobody)
    skipped = [engine.receive(step())[1]]
    engine.send(step())
    slots = step().attn_metadata.slot_mapping
    sent = engine.kv(slots)
    engine.spoil()
    dist.barrier()
    skipped.append(engine.receive(step())[1])
    is_whole = same(engine.kv(slots), sent)
    dist.barrier()
    if rank == 1:
        min(path for path in engine.payloads() if mine in path.name).unlink()
        engine.agent.forget()
    dist.barrier()
    skipped.append(engine.receive(step())[1])
    engine.close()
    dist.destroy_process_group()
    vllm = [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    return {"skipped": skipped, "whole": is_whole, "vllm": vllm}


@pytest.mark.parametrize(("kind", "first_skips"), [("tp", False), ("pp", True)])
def test_a_rank_that_misses_makes_its_whole_stage_compute_and_no_other(
    folder: Path, kind: str, *, first_skips: bool
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), str(rank), kind],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [one["skipped"] for one in said] == [[False, True, first_skips], [False, True, False]]
    assert all(one["whole"] and not one["vllm"] for one in said)


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
