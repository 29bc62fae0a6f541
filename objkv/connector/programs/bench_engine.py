"""One engine of ``bench engine``: a process that does what it is told, line by line.

``python -m objkv.connector.programs.bench_engine job.json`` answers each order on standard input
with one line on standard output; what vLLM prints goes to standard error. It ends with its input.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from objkv.connector.programs.demo_model import device, make_model
from objkv.connector.programs.demo_replica import Asker
from objkv.ops.bench.jobs import ORDER, Ask, Batch, EngineJob, Ready, Took, tokens_of

KV_CACHE_BYTES = 256 << 20
_PROMPTS_AT_ONCE = 4


class Engine:
    """A live engine."""

    def __init__(self, job: EngineJob) -> None:
        import vllm
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        self._llm: Any = vllm.LLM(**_arguments(job, make_model(job.models, job.size), cpu=cpu))
        self._asker = Asker(self._llm)
        self.ready = Ready(engine=f"vLLM {vllm.__version__}", device=device())

    def do(self, order: Batch | Ask) -> Took:
        """Carry out one order."""
        return self._batch(order) if isinstance(order, Batch) else self._ask(order)

    def _ask(self, order: Ask) -> Took:
        tokens, busy = tokens_of(order.seed, order.tokens), time.thread_time()
        answer = self._asker.ask(f"document {order.seed}", tokens)
        return Took(
            seconds=answer.first_token_s,
            busy_s=time.thread_time() - busy,
            answer=(answer.tokens,),
            served_tokens=answer.served_tokens,
        )

    def _batch(self, order: Batch) -> Took:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=order.answer
        )
        prompts = [tokens_of(order.seed, order.tokens, prompt=n) for n in range(order.prompts)]
        engine = self._llm.llm_engine
        finished: dict[str, Any] = {}
        started, busy = time.perf_counter(), time.thread_time()
        for number, tokens in enumerate(prompts):
            name = f"{order.seed}-{number}"
            engine.add_request(name, {"prompt_token_ids": tokens}, params)
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        seconds, busy_s = time.perf_counter() - started, time.thread_time() - busy
        outputs = sorted(finished.values(), key=lambda output: int(output.request_id.split("-")[1]))
        return Took(
            seconds=seconds,
            busy_s=busy_s,
            answer=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
            served_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        )


def _arguments(job: EngineJob, model: Path, *, cpu: bool) -> dict[str, Any]:
    """What ``vllm.LLM`` is called with."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        # With fewer bits the order of the sums would tip the answers of a random model.
        "dtype": "float32",
        "enforce_eager": True,
        "hf_overrides": {"max_position_embeddings": job.longest},
        "max_model_len": job.longest,
        "max_num_batched_tokens": job.longest,
        "max_num_seqs": _PROMPTS_AT_ONCE,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "seed": 0,
        "disable_log_stats": True,
    }
    if cpu:
        # All in this process: no other takes part in what is measured.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments["distributed_executor_backend"] = "uni"
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
        for line in sys.stdin:
            answers.write(engine.do(ORDER.validate_json(line)).model_dump_json() + "\n")
            answers.flush()


if __name__ == "__main__":  # Workers in processes of their own import this file once more.
    main()
