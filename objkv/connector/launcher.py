"""Refuses engines of which every rank schedules by itself.

Where a launcher like torchrun starts the ranks, each has a whole engine, scheduler and connector of
its own, and nothing but equal decisions keeps them in step. What a connector answers depends on
when a store answers, so one rank would load what another computes, and their collective operations
would not meet. Source: vLLM 0.31-0.33, ``ExecutorWithExternalLauncher`` in
``v1/executor/uniproc_executor.py``; ``world_size`` counts its data-parallel ranks too, see
``ParallelConfig.__post_init__``.
"""

from typing import TYPE_CHECKING

from objkv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SCHEDULES_FOR_ALL = ("mp", "ray", "uni", None)
"""By name, so that looking does not import an executor that is not installed."""


def refuse_external_launcher(vllm_config: "VllmConfig") -> None:
    """Raises ``ConfigError``, with what to do, for several ranks with a scheduler each."""
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1 or parallel.distributed_executor_backend in _SCHEDULES_FOR_ALL:
        return
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    if issubclass(Executor.get_class(vllm_config), ExecutorWithExternalLauncher):
        raise ConfigError(
            f"objkv does not support external_launcher with {parallel.world_size} ranks, which "
            "schedule each by itself and would not agree on what was loaded: run it without the "
            "objkv connector, or let vLLM start the ranks: --distributed-executor-backend mp or ray"
        )
