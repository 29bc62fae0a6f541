"""One engine of ``benchmarks.engine``: a process that executes one order per line.

``python -m benchmarks.engine_child job.json PIPE`` answers each order in a named pipe with one line
on standard output. vLLM's output goes to standard error.
"""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from objkv.ops.demo import Size
from objkv.ops.replica import VOCABULARY
from objkv.programs.replica import ReplicaEngine, device, engine_arguments, make_model

Connector = Literal["none", "objkv", "objkv-loads", "example", "example-loads"]
"""``-loads``: a second replica, which only loads what the first one saved."""
_SPECIAL = 3


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineJob(_Value):
    """One engine's whole life."""

    size: Size
    models: Path
    """Folder in which the model is made, unless it is there."""
    connector: Connector
    folder: Path
    """Where the example connector keeps what it saves."""
    longest: int
    """Tokens of the longest prompt with its answer."""


class Order(_Value):
    """Answer prompts at once, with an empty prefix cache of vLLM's own."""

    seed: int
    """Of the first ``tokens`` tokens of as many documents as there are prompts."""
    prompts: int = 1
    tokens: int
    answer: int


class Ready(_Value):
    """The engine runs."""

    engine: str
    device: str


class Took(_Value):
    """What came of an order."""

    seconds: float
    """For all prompts."""
    first_token_s: float
    """Until the first token of any of them."""
    answer: tuple[tuple[int, ...], ...]
    """Token ids, by prompt."""
    served_tokens: int
    """Of the prompts, by the connector or from the engine's own cache."""


def tokens_of(seed: int, count: int, *, prompt: int = 0) -> list[int]:
    """Token ids of a made-up text; of two lengths the shorter begins the longer."""
    source = random.Random(f"{seed} {prompt}")
    return [source.randrange(_SPECIAL, VOCABULARY) for _ in range(count)]


class Engine:
    """A live engine."""

    def __init__(self, job: EngineJob) -> None:
        import vllm

        self._llm: Any = vllm.LLM(**_arguments(job))
        self._demo = ReplicaEngine(self._llm)
        self.ready = Ready(engine=f"vLLM {vllm.__version__}", device=device())

    def do(self, order: Order) -> Took:
        """Carry out one order."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=order.answer
        )
        prompts = [tokens_of(order.seed, order.tokens, prompt=n) for n in range(order.prompts)]
        self._demo.forget()
        engine = self._llm.llm_engine
        finished: dict[str, Any] = {}
        started, first_token_s = time.perf_counter(), None
        for number, tokens in enumerate(prompts):
            engine.add_request(f"{number}", {"prompt_token_ids": tokens}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if first_token_s is None and output.outputs[0].token_ids:
                    first_token_s = time.perf_counter() - started
                if output.finished:
                    finished[output.request_id] = output
        seconds = time.perf_counter() - started
        assert first_token_s is not None
        outputs = [finished[f"{number}"] for number in range(order.prompts)]
        return Took(
            seconds=seconds,
            first_token_s=first_token_s,
            answer=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
            served_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        )


def _arguments(job: EngineJob) -> dict[str, Any]:
    """What ``vllm.LLM`` is called with."""
    model = make_model(job.models, job.size, job.longest)
    arguments = engine_arguments(str(model), job.longest) | {"disable_log_stats": True}
    if job.connector.startswith("example"):
        arguments["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(job.folder)},
        }
    elif job.connector != "none":
        role = "kv_both" if job.connector == "objkv" else "kv_consumer"
        arguments["kv_transfer_config"] = {"kv_connector": "ObjKVConnector", "kv_role": role}
    return arguments


def main() -> None:
    """Keep standard output for answers: vLLM and what it starts print elsewhere."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        engine = Engine(EngineJob.model_validate_json(Path(sys.argv[1]).read_text()))
        answers.write(engine.ready.model_dump_json() + "\n")
        answers.flush()
        with open(sys.argv[2]) as orders:
            for line in orders:
                answers.write(engine.do(Order.model_validate_json(line)).model_dump_json() + "\n")
                answers.flush()


if __name__ == "__main__":  # Workers in processes of their own import this file once more.
    main()
