"""One replica of ``gpu-check``: a process with an engine that answers long prompts.

``python -m objkv.programs.check_replica SETUP`` takes a ``ReplicaSetup`` as JSON and
prints one ``ReplicaEvent`` per line; vLLM's output goes to standard error. On a GPU the engine has
vLLM's defaults.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from objkv.ops.demo import ANSWER_TOKENS, CONNECTOR, random_tokens
from objkv.ops.gpu_check import QUESTIONS, ReplicaSetup, prompt_of
from objkv.programs.demo_replica import (
    Send,
    answer,
    engine_arguments,
    make_llama,
    speak,
)

_MEMORY_SHARE = 0.6
"""Share of the GPU's memory for the engine, because other programs may use some."""
_SHAPES: Final = {
    "gpu": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
    },
    "cpu": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3},
}
"""Random models: the one for GPUs has the shape of Llama 3.2 1B."""


def arguments_of(setup: ReplicaSetup, *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``."""
    longest = setup.longest + ANSWER_TOKENS
    model: Path | str | None = setup.model
    if model is None:
        kind, dtype = ("cpu", "float32") if is_cpu else ("gpu", "bfloat16")
        model = make_llama(setup.models, f"check-{kind}", _SHAPES[kind], longest, dtype)
    arguments = engine_arguments(Path(model), longest) | {"model": str(model)}
    if not is_cpu:
        for name in ("enforce_eager", "kv_cache_memory_bytes", "max_num_batched_tokens"):
            del arguments[name]
        arguments |= {"dtype": "auto", "gpu_memory_utilization": _MEMORY_SHARE}
    if setup.role != "R":
        arguments["kv_transfer_config"] = CONNECTOR
    return arguments


def answers_of(setup: ReplicaSetup) -> Iterator[tuple[int, int, bool]]:
    """Yield what the replica answers: document, question, and whether it forgets its own prefix
    cache before."""
    first = QUESTIONS[0]
    for length in setup.lengths:
        if setup.role == "R":
            yield from [(length, first, True)] * setup.repeats
            yield from ((length, question, False) for question in QUESTIONS)
        elif setup.role == "A":
            yield length, first, True
        else:
            for question in QUESTIONS:
                yield from [(length, question, True)] * setup.repeats


def run(setup: ReplicaSetup, send: Send) -> None:
    """Run a replica from start to end in this process."""

    def arguments() -> dict[str, Any]:
        from vllm.platforms import current_platform

        return arguments_of(setup, is_cpu=current_platform.is_cpu())

    prompts = (
        (*prompt_of(length, question), forget) for length, question, forget in answers_of(setup)
    )
    answer(arguments, random_tokens("warm-up", setup.longest), prompts, send)


if __name__ == "__main__":  # spawned worker processes import this file again
    speak(partial(run, ReplicaSetup.model_validate_json(sys.argv[1])))
