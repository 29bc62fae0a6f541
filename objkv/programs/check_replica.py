"""One replica of ``gpu-check``: a process with an engine that answers long prompts.

``python -m objkv.programs.check_replica SETUP`` takes a ``ReplicaSetup`` as JSON and
prints one ``ReplicaEvent`` per line; vLLM's output goes to standard error. On a GPU the engine has
vLLM's defaults.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from objkv.ops.demo import ANSWER_TOKENS, CONNECTOR, ReplicaEnd, ReplicaEvent, random_tokens
from objkv.ops.gpu_check import QUESTIONS, ReplicaSetup, prompt_of
from objkv.programs.demo_replica import (
    DemoEngine,
    device,
    engine_arguments,
    make_llama,
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
Send = Callable[[ReplicaEvent], None]


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

    def begin(stage: str) -> None:
        send(ReplicaEvent(stage=stage))

    begin("importing vLLM")
    import vllm
    from vllm.platforms import current_platform

    begin("making the model" if setup.model is None else f"loading {setup.model}")
    arguments = arguments_of(setup, is_cpu=current_platform.is_cpu())
    begin("starting the engine")
    llm = vllm.LLM(**arguments, disable_log_stats=False)
    engine = DemoEngine(llm)
    begin("warming up")
    engine.ask("warm-up", random_tokens("warm-up", setup.longest))
    for length, question, forget in answers_of(setup):
        name, tokens = prompt_of(length, question)
        begin(f"answering {name}")
        send(ReplicaEvent(answer=engine.ask(name, tokens, forget=forget)))
    failures = (m.value for m in llm.get_metrics() if m.name == "vllm:objkv_load_failures")
    end = ReplicaEnd(
        engine=f"vLLM {vllm.__version__}", device=device(), load_failures=int(sum(failures))
    )
    begin("stopping")
    llm.llm_engine.engine_core.shutdown()
    send(ReplicaEvent(end=end))


def main() -> None:
    """Reserve standard output for events; redirect vLLM's output to standard error."""
    setup = ReplicaSetup.model_validate_json(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as events:
        os.dup2(2, 1)

        def send(event: ReplicaEvent) -> None:
            events.write(event.model_dump_json(exclude_none=True) + "\n")
            events.flush()

        run(setup, send)


if __name__ == "__main__":  # spawned worker processes import this file again
    main()
