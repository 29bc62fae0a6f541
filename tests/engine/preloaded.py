"""What replicas import, and what of vLLM they do without: imported once, before they are forked off
(see ``tests.support.nursery``)."""

import functools
import gc
import multiprocessing
import os
import time
from typing import Any


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

    # Nothing is compiled, not even the mask of a rank's embeddings, which takes it two seconds.
    import torch._dynamo.config

    torch._dynamo.config.disable = True

    _leave_idle_processors_to_others()
    assert LLM
    assert vllm.lora.request
    gc.unfreeze = lambda: None  # vLLM collects often, also as it ends, after it has unfrozen all


def _leave_idle_processors_to_others() -> None:
    """Several engines share two processors. A rank that waits for a message looks for it without a
    pause, for a second; then it is notified, or looks again after 5 s if that is lost. Each of its
    13 groups has a thread that looks every 10 ms. Source: ``SpinCondition`` in vLLM 0.32,
    ``gloo/transport/tcp/loop.cc``."""
    from torch.distributed import ProcessGroupGloo
    from vllm.distributed.device_communicators import shm_broadcast

    assert hasattr(shm_broadcast, "sched_yield")
    shm_broadcast.sched_yield = lambda: time.sleep(0.001)
    assert hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS")
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 50

    device = functools.cache(lambda _process: ProcessGroupGloo.create_default_device())
    make: Any = ProcessGroupGloo.__init__

    def share(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options: Any = ProcessGroupGloo._Options()
        options._devices, options._threads = [device(os.getpid())], 1
        options._timeout = timeout
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = share  # type: ignore[method-assign]


_prepare()
