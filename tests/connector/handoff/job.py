"""One of two ranks of a V0 engine, as a process of its own in which vLLM cannot be imported.

Receives before anything was sent, after everything was, and after the second rank lost a payload.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.modules["vllm"] = None  # type: ignore[assignment]

import torch.distributed as dist  # noqa: E402

from tests.connector.handoff.model import LAYERS, Shape  # noqa: E402
from tests.connector.handoff.world import Engine, same, step  # noqa: E402


def run(folder: Path, rank: int, *, tensor_parallel: bool) -> dict[str, Any]:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    shape, mine = Shape(start_layer=rank, end_layer=1 + 2 * rank), "L1-3"
    if tensor_parallel:
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
    dist.barrier()
    skipped.append(engine.receive(step())[1])
    engine.connector.close()
    dist.destroy_process_group()
    vllm = [name for name in sys.modules if name.startswith("vllm.")]
    return {"skipped": skipped, "whole": is_whole, "vllm": vllm}


if __name__ == "__main__":
    told = run(Path(sys.argv[1]), int(sys.argv[2]), tensor_parallel=sys.argv[3] == "tp")
    print(json.dumps(told))
