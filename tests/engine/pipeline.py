"""What vLLM leaves out of a pipeline on the CPU, made up for: a ``Call`` before the first prompt.

A stage after the first one receives into buffers that vLLM makes in a dummy run, which its CPU
worker does not do without compiling. Source: vLLM 0.32, ``_dummy_run`` in
``v1/worker/gpu_model_runner.py`` and ``warming_up_model`` in ``v1/worker/cpu_model_runner.py``.
"""

import faulthandler
import signal
from typing import Any


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
