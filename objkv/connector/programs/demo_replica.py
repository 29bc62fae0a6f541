"""One replica of the demo: a process with an engine that answers prompts one after the other.

``python -m objkv.connector.programs.demo_replica job.json`` tells what happens as JSON lines on
standard output; what vLLM prints goes to standard error.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from objkv.connector.programs.demo_model import device, make_model
from objkv.ops.demo.job import (
    ANSWER_TOKENS,
    CONNECTOR,
    KV_CACHE_BYTES,
    SCALES,
    Answer,
    Done,
    Job,
    Stage,
)

Tell = Callable[[Stage | Answer | Done], None]

_FORGET_S = 30.0


class Asker:
    """Asks one engine one prompt at a time."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._asked = 0

    def _forget(self) -> None:
        """Empty vLLM's own prefix cache, which would answer what was asked here before."""
        deadline = time.monotonic() + _FORGET_S
        while not self._llm.reset_prefix_cache():
            # Blocks of the last prompt are held until its saves have left the GPU.
            if time.monotonic() > deadline:
                raise RuntimeError("vLLM could not reset its prefix cache: blocks are in use")
            time.sleep(0.05)

    def ask(self, name: str, tokens: Sequence[int]) -> Answer:
        """The greedy answer, on a replica that remembers nothing of earlier prompts itself."""
        from vllm import SamplingParams

        self._forget()
        params = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=ANSWER_TOKENS
        )
        self._asked += 1
        start, first_token_s, output = time.perf_counter(), None, None
        self._engine.add_request(f"{self._asked}", {"prompt_token_ids": list(tokens)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if first_token_s is None and output.outputs[0].token_ids:
                    first_token_s = time.perf_counter() - start
        if output is None or first_token_s is None:
            raise RuntimeError(f"no answer to {name}")
        return Answer(
            prompt=name,
            tokens=tuple(output.outputs[0].token_ids),
            served_tokens=output.num_cached_tokens or 0,
            first_token_s=first_token_s,
        )


def run(job: Job, tell: Tell) -> None:
    """Live the whole life of a replica in this process."""
    tell(Stage(text="importing vLLM"))
    import vllm
    from vllm.platforms import current_platform

    tell(Stage(text="making the model"))
    model = make_model(job.models, job.size)
    tell(Stage(text="starting the engine"))
    llm = vllm.LLM(**_arguments(job, model, cpu=current_platform.is_cpu()))
    asker = Asker(llm)
    tell(Stage(text="warming up"))
    asker.ask("warm-up", job.warm_up)
    for prompt in job.prompts:
        tell(Stage(text=f"answering {prompt.name}"))
        tell(asker.ask(prompt.name, prompt.tokens))
    failures = _counter(llm, "vllm:objkv_load_failures")
    tell(Stage(text="stopping"))
    llm.llm_engine.engine_core.shutdown()
    tell(
        Done(
            engine=f"vLLM {vllm.__version__}",
            device=device(),
            load_failures=failures,
        )
    )


def _arguments(job: Job, model: Path, *, cpu: bool) -> dict[str, Any]:
    """What ``vllm.LLM`` is called with: small and quick to start, otherwise as it comes."""
    longest = SCALES[job.size].longest
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        # With fewer bits the order of the sums, which the number of computed tokens changes,
        # would tip the answers of a random model.
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "seed": 0,
        "disable_log_stats": False,
    }
    if cpu:
        # All in this process, which starts in a third of the time.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments["distributed_executor_backend"] = "uni"
    if job.connector:
        arguments["kv_transfer_config"] = CONNECTOR
    return arguments


def _counter(llm: Any, name: str) -> int:
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == name))


def main() -> None:
    """Keep standard output for what is told: vLLM and what it starts print elsewhere."""
    with os.fdopen(os.dup(1), "w") as events:
        os.dup2(2, 1)

        def tell(event: Stage | Answer | Done) -> None:
            events.write(event.model_dump_json() + "\n")
            events.flush()

        run(Job.model_validate_json(Path(sys.argv[1]).read_text()), tell)


if __name__ == "__main__":  # Workers in processes of their own import this file once more.
    main()
