"""One replica: a process that starts a real engine, takes the job's steps, and writes the result.

``python -m tests.engine.replica job.json result.json``; started by ``tests.engine.harness``.
"""

import gc
import importlib
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine import model
from tests.engine.job import Generate, Job, LogLine, Output, Prompt, Result


@dataclass
class _Running:
    number: int
    prompt: Prompt
    arrived_steps: int
    last: Any = None
    """vLLM's newest RequestOutput, if any."""

    def is_to_be_aborted(self, steps: int, *, others: bool) -> bool:
        """``others``: whether prompts that wait for no file are still to come or to finish."""
        limit, file = self.prompt.abort_after_steps, self.prompt.abort_when
        if file is not None and not others and file.exists():
            return True
        return limit is not None and steps - self.arrived_steps >= limit

    def output(self, steps: int) -> Output:
        made = self.last.outputs[0] if self.last else None
        finished = self.last is not None and self.last.finished
        return Output(
            tokens=tuple(made.token_ids) if made else (),
            cached_tokens=self.last.num_cached_tokens if self.last else None,
            finish_reason=made.finish_reason if made and finished else "abort",
            steps=steps - self.arrived_steps,
        )


class Driver:
    """Generates by stepping the engine, whose core is in this process or in others."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._requests = 0
        self._adapters: dict[Path, int] = {}

    def generate(self, prompts: tuple[Prompt, ...]) -> tuple[Output, ...]:
        waiting = sorted(range(len(prompts)), key=lambda i: prompts[i].after_steps)
        running: dict[str, _Running] = {}
        finished: dict[int, Output] = {}
        steps = 0

        def end(name: str) -> None:
            request = running.pop(name)
            finished[request.number] = request.output(steps)

        while waiting or running:
            while waiting and (prompts[waiting[0]].after_steps <= steps or not running):
                number = waiting.pop(0)
                running[self._submit(prompts[number])] = _Running(number, prompts[number], steps)
            outputs = self._engine.step()
            steps += 1
            for output in outputs:
                running[output.request_id].last = output
                if output.finished:
                    end(output.request_id)
            others = bool(waiting) or any(r.prompt.abort_when is None for r in running.values())
            for name, request in list(running.items()):
                if request.is_to_be_aborted(steps, others=others):
                    self._engine.abort_request([name])
                    end(name)
        return tuple(finished[number] for number in range(len(prompts)))

    def _submit(self, prompt: Prompt) -> str:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        inputs: dict[str, Any] = {"prompt_token_ids": list(prompt.tokens)}
        if prompt.cache_salt is not None:
            inputs["cache_salt"] = prompt.cache_salt
        params = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=prompt.max_tokens
        )
        lora = None
        if prompt.lora is not None:
            number = self._adapters.setdefault(prompt.lora, len(self._adapters) + 1)
            lora = LoRARequest(prompt.lora.name, number, str(prompt.lora))
        name = f"request-{self._requests}"
        self._requests += 1
        self._engine.add_request(name, inputs, params, lora_request=lora)
        return name


def run(job: Job) -> Result:
    warnings = keep_warnings()
    gc.disable()
    from vllm import LLM

    gc.freeze()  # Millions of objects that live as long as the process; vLLM collects often.
    gc.enable()
    llm = LLM(**arguments(job))
    driver = Driver(llm.llm_engine)
    outputs, answers = list[tuple[Output, ...]](), list[Any]()
    for step in job.steps:
        if isinstance(step, Generate):
            outputs.append(driver.generate(step.prompts))
        else:
            module, _, name = step.function.partition(":")
            function = getattr(importlib.import_module(module), name)
            answers.append(function(llm, **step.arguments))
    metrics, began = read_metrics(llm), time.perf_counter()
    llm.llm_engine.engine_core.shutdown()
    return Result(
        outputs=tuple(outputs),
        answers=tuple(answers),
        metrics=metrics,
        warnings=tuple(warnings),
        stop_s=time.perf_counter() - began,
    )


def keep_warnings() -> list[LogLine]:
    """A list that grows by all that this process logs at WARNING or above from now on.

    Records are caught where they are made, because vLLM replaces handlers when it starts.
    """
    lines: list[LogLine] = []
    make = logging.getLogRecordFactory()

    def keep(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.levelno >= logging.WARNING:
            message = record.getMessage()
            lines.append(LogLine(level=record.levelname, logger=record.name, message=message))
        return record

    logging.setLogRecordFactory(keep)
    return lines


def arguments(job: Job) -> dict[str, Any]:
    """What ``vllm.LLM`` is called with: small, eager, greedy, without a tokenizer."""
    common: dict[str, Any] = {
        "model": str(model.make(job.model)),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20,
        "seed": 0,
        "disable_log_stats": False,
    }
    if not job.processes:
        common["distributed_executor_backend"] = "uni"
    if job.connector is not None:
        common["kv_transfer_config"] = job.connector
    return common | job.engine


def read_metrics(llm: Any) -> dict[str, float]:
    """vLLM's counters and gauges, without the labels that are the same everywhere."""
    from vllm.v1.metrics.reader import Counter, Gauge

    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Counter | Gauge) and not metric.name.endswith("_info"):
            labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
            shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            values[metric.name + (f"{{{shown}}}" if shown else "")] = metric.value
    return values


def main() -> None:
    """Read the job, run it, write the result whole or not at all."""
    job_file, result_file = map(Path, sys.argv[1:])
    result = run(Job.model_validate_json(job_file.read_text()))
    partial = result_file.with_suffix(".partial")
    partial.write_text(result.model_dump_json())
    partial.rename(result_file)


if __name__ == "__main__":  # Workers in processes of their own import this file once more.
    main()
