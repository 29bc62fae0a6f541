"""Replicas of several workers: tensor-parallel ranks, or the stages of a pipeline."""

import faulthandler
import signal
from typing import Any

from tests.engine.job import Call, Job

BUFFERS = Call(function="tests.engine.ranks:make_buffers")
"""Before the first prompt of a pipeline. A stage after the first one receives into buffers that
vLLM makes in a dummy run, which its CPU worker does not do without compiling. Source: vLLM 0.32,
``_dummy_run`` in ``v1/worker/gpu_model_runner.py``."""
_ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""A function goes to the workers."""


def on_ranks(job: Job, ranks: int = 1, stages: int = 1) -> Job:
    if ranks == stages == 1:
        return job
    engine: dict[str, Any] = {"distributed_executor_backend": "mp"}
    engine |= {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    steps = (BUFFERS, *job.steps) if stages > 1 else job.steps
    changed = {"engine": job.engine | engine, "env": job.env | _ENVIRONMENT, "steps": steps}
    return job.model_copy(update=changed)


def make_buffers(llm: Any) -> list[bool]:
    """Make them; per rank, whether it needed some. For engines whose core is in this process."""
    return list(llm.collective_rpc(_make))


def _make(worker: Any) -> bool:
    from vllm.distributed.parallel_state import get_pp_group

    # vLLM sends it to stages that do not end, before it kills them: they tell where they wait.
    faulthandler.register(signal.SIGTERM, chain=True)
    runner = worker.model_runner
    if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return False
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
    return True


_make.objkv_keeps_weights = True  # type: ignore[attr-defined]
