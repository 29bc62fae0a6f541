"""What replicas import, and what of vLLM they do without: imported once, before they are forked off
(see ``tests.support.nursery``)."""

import gc
import multiprocessing


def _prepare() -> None:
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.entrypoints.launchers.cli_args
    import vllm.entrypoints.openai.api_server
    import vllm.lora.request
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.cpu_worker
    from vllm import LLM

    # vLLM starts a process of 10 s to look at each class of model, so that CUDA is not initialised.
    # There is none here, and the replica imports the class anyway.
    from vllm.model_executor.models import registry

    import objkv.connector.kv.connector  # noqa: F401

    assert hasattr(registry, "_run_in_subprocess")
    registry._run_in_subprocess = lambda look: look()

    # vLLM looks for its kernels in every module, in each engine anew; once is enough.
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    vars(current_platform)["register_triton_kernel_overrides"] = lambda: None

    # Engines of servers and ranks are forks too; on CPUs vLLM starts Python anew for each.
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        assert hasattr(module, "get_mp_context")
        module.get_mp_context = lambda: multiprocessing.get_context("fork")

    assert LLM
    assert vllm.lora.request
    gc.unfreeze = lambda: None  # vLLM collects often, also as it ends, after it has unfrozen all


_prepare()
