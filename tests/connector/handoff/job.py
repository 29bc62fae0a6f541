"""One rank of V0 engines, as a process of its own, in which vLLM cannot be imported.

Reads a JSON document a line, each a job with a new connector, and answers each with another.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.modules["vllm"] = None  # type: ignore[assignment]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from objkv.connector.handoff.connector import HandoffConnector  # noqa: E402
from tests.connector.handoff.model import (  # noqa: E402
    LAYERS,
    Intermediate,
    Model,
    Shape,
    engine_config,
    next_token,
    prompts,
)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """``mode``: ``prefill`` computes and sends; ``decode`` receives, computes what it did not
    receive, and generates."""
    rank, tp, pp = job.get("rank", 0), job.get("tp", 1), job.get("pp", 1)
    world = tp * pp
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{job['meeting']}", rank=rank, world_size=world
        )
        # The model's own; those of the connector are the connector's.
        groups = [dist.new_group(list(range(i, i + tp))) for i in range(0, world, tp)]
    stage = rank // tp
    bounds = [LAYERS * i // pp for i in range(pp + 1)]
    shape = Shape(rank % tp, tp, bounds[stage], bounds[stage + 1], latent=job.get("latent", False))

    def add_up(partial: torch.Tensor) -> torch.Tensor:
        if tp > 1:
            dist.all_reduce(partial, group=groups[stage])
        return partial

    model = Model(shape, add_up)
    caches = model.caches()
    config = engine_config(
        Path(job["folder"]), latent=shape.latent, tp_size=tp, **job.get("settings", {})
    )
    connector = HandoffConnector(rank, rank, config)
    step = prompts(job["prompts"], job["tables"])

    def forward(step: Any, received: Any = None) -> Any:
        """All stages, one after the other, as V0's workers: the next one waits for this one's
        output, whether that was computed or received."""
        given = None
        if stage > 0:
            pieces: list[Any] = [None]
            dist.recv_object_list(pieces, src=rank - tp)
            given = Intermediate(pieces[0])
        output = model.forward(step, caches, given) if received is None else received
        if stage < pp - 1:
            dist.send_object_list([output.tensors], dst=rank + tp)
        return output

    received, bypass = None, False
    if job["mode"] == "decode":
        received, bypass, same = connector.recv_kv_caches_and_hidden_states(model, step, caches)
        assert same is step
        assert bypass == (received is not None)
    output = forward(step, received)
    if job["mode"] == "prefill":
        connector.send_kv_caches_and_hidden_states(model, step, caches, output)
    computed = model.computed
    tokens = []
    if job["mode"] != "prefill":
        tokens = [generate(job, i, model, forward, output, pp == stage + 1) for i in job["follow"]]
    connector.close()
    if world > 1:
        dist.destroy_process_group()
    loaded = sorted(name for name in sys.modules if name.startswith("vllm."))
    return {"bypass": bypass, "computed": computed, "tokens": tokens, "vllm": loaded}


def generate(
    job: dict[str, Any], i: int, model: Model, forward: Any, output: Any, last: bool
) -> list[int]:
    """Eight tokens after prompt ``i``; the last stage chooses them."""
    prompt, table = job["prompts"][i], job["tables"][i]
    end = sum(len(one) for one in job["prompts"][: i + 1])
    tokens: list[int] = []
    hidden = output[end - 1] if last else None
    for count in range(8):
        choice = [model.token(hidden) if last else 0]
        if dist.is_initialized():
            dist.broadcast_object_list(choice, src=dist.get_world_size() - 1)
        tokens += choice
        output = forward(next_token(choice[0], len(prompt) + count, table))
        hidden = output[0] if last else None
    return tokens


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
