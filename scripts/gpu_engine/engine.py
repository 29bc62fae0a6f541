"""One engine, its times to the first token, and its answers:
``python -m scripts.gpu_engine.engine RESULTS JOB``.

The exact comparison is that of loaded KV with the engine's own prefix cache: both compute the same
few tokens after the same prefix. A prompt that is computed whole has other shapes, so that rounding
may change a token: that is shown, and not judged.
"""

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.gpu_engine import Job, Results, milliseconds

VOCABULARY, QUESTION, ANSWER, CHUNK = 32_000, 8, 16, 256
SHAPES: dict[str, tuple[dict[str, int], int]] = {
    "1b": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        12 << 30,
    ),
    "8b": (
        {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        24 << 30,
    ),
    "tiny": (
        {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        256 << 20,
    ),
}  # fmt: skip
"""Configurations and bytes of KV cache. KV has 64 KiB a token (1b) and 128 (8b, as Llama 3's)."""
RUNNING, GAPS_BEFORE, SETTLING, GAPS_S = 8, 120, 20, 45
"""Requests that decode while another one begins, how many of their steps are looked at, and for how
long at most."""
LOADS = 4


def document(length: int, name: object) -> list[int]:
    """Random token ids."""
    source = random.Random(f"{length} {name}")  # noqa: S311 the same every time
    return [source.randrange(3, VOCABULARY) for _ in range(length)]


def prompt(length: int, name: object, question: int = 0) -> list[int]:
    """A document, and fewer tokens than a block: a prefix cache ends where the document does."""
    return document(length, name) + document(QUESTION, f"question {question}")


def make_model(job: Job) -> Path:
    """Write the configuration of a model without weights."""
    folder = job.folder / job.shape
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": max(job.lengths) + 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config | SHAPES[job.shape][0]))
    return folder


def arguments_of(job: Job) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``."""
    found: dict[str, Any] = {
        "model": str(make_model(job)),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "worker_extension_cls": "scripts.gpu_engine.weights.Extension",
        "dtype": "float32" if job.cpu else "bfloat16",
        "enforce_eager": True,  # torch.compile of this vLLM was not tried with an older PyTorch
        "seed": 0,
        "max_num_seqs": 32,
        "max_model_len": max(job.lengths) + 2048,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": SHAPES[job.shape][1],
        "disable_log_stats": False,
    }
    if job.cpu:
        found["distributed_executor_backend"] = "uni"
    else:
        found |= {"attention_backend": job.attention, "block_size": 16}
    if job.agent:
        found["kv_transfer_config"] = {
            "kv_connector": "ObjKVConnector",
            "kv_connector_module_path": "objkv.connector",
            "kv_role": "kv_both",
        }
    return found


class Engine:
    """An engine that is stepped here."""

    def __init__(self, job: Job, results: Results) -> None:
        import vllm

        began = time.perf_counter()
        self._llm: Any = vllm.LLM(**arguments_of(job))
        self._params = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
        self.engine = self._llm.llm_engine
        self._core = None if job.own_process else self.engine.engine_core.engine_core
        self._asked = 0
        blocks = self.engine.vllm_config.cache_config.num_gpu_blocks
        seconds = round(time.perf_counter() - began, 1)
        results.add("started", seconds=seconds, vllm=vllm.__version__, blocks=blocks)

    def add(self, tokens: Sequence[int], count: int) -> str:
        """Begin a request of ``count`` tokens."""
        self._asked += 1
        params = self._params.clone()
        params.max_tokens = count
        name = f"{self._asked}"
        self.engine.add_request(name, {"prompt_token_ids": list(tokens)}, params)
        return name

    def step(self) -> Any:
        """Outputs of one step."""
        outputs = self.engine.step()
        if self._core and not outputs:
            time.sleep(0.001)  # as EngineCore in its own process does between idle steps
        return outputs

    def forget(self) -> None:
        """Empty vLLM's own prefix cache. Blocks are in use until their saves have left the GPU,
        which the scheduler learns in a step."""
        end = time.monotonic() + 30
        while (self._core and self._core.scheduler.has_requests()) or (
            not self._llm.reset_prefix_cache()
        ):
            if time.monotonic() > end:
                raise RuntimeError("vLLM cannot reset its prefix cache: blocks are in use")
            if self._core:
                self.engine.step()
            time.sleep(0.001)

    def ask(self, tokens: Sequence[int], *, forget: bool = True) -> tuple[float, list[int], int]:
        """Seconds to the first token, the answer, and tokens that were not computed."""
        if forget:
            self.forget()
        began, first, last = time.perf_counter(), 0.0, None
        self.add(tokens, ANSWER)
        while self.engine.has_unfinished_requests():
            for last in self.step():
                if not first and last.outputs[0].token_ids:
                    first = time.perf_counter() - began
        assert last is not None
        return first, list(last.outputs[0].token_ids), last.num_cached_tokens or 0

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of objkv, and of vLLM's caches."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", getattr(metric, "sum", None))
            if any(word in metric.name for word in ("objkv", "prefix_cache")) and value:
                labels = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
                found[" ".join((metric.name, *labels))] = value
        return found


class Session:
    """All measurements with one engine."""

    def __init__(self, job: Job, results: Results) -> None:
        self._job, self._results = job, results
        self._engine = Engine(job, results)
        self._repeats = 1 if job.shape == "8b" else 2
        self._computed: dict[tuple[int, int], list[int]] = {}
        self._cached: dict[tuple[int, int], list[int]] = {}
        """Answers by length and number of the document."""

    def run(self) -> None:
        """Warm up, and measure."""
        attempt = self._results.attempt
        shortest, longest = min(self._job.lengths), max(self._job.lengths)
        for _ in range(2):  # the second time loads
            self._engine.ask(prompt(longest, "warm-up"))
            self._wait_saved(longest // CHUNK)
        for length in self._job.lengths:
            with attempt(f"computing {length}"):
                self._compute(length)
        with attempt("control"):
            other = prompt(shortest, 0)
            other[10:200] = document(190, "another beginning")
            _, answer, _ = self._engine.ask(other)
            assert answer != self._computed[shortest, 0], "answers do not depend on the document"
        if self._job.agent:
            with attempt("saves"):
                chunks = longest // CHUNK + self._repeats * sum(self._job.lengths) // CHUNK
                self._results.add("saved", expected=chunks, found=self._wait_saved(chunks))
            for length in self._job.lengths:
                with attempt(f"loading {length}"):
                    self._load(length)
            with attempt("gaps beside a load"):
                self._gaps("loads", prompt(longest, 0))
        with attempt("gaps beside a computation"):
            self._gaps("is computed", prompt(longest, "new"))
        with attempt("metrics"):
            values = self._engine.metrics()
            failures = {name: value for name, value in values.items() if "fail" in name}
            self._results.add("failures", values=failures)
            self._results.add("metrics", values=values)
        with attempt("end"):
            self._engine.engine.engine_core.shutdown()

    def _compute(self, length: int) -> None:
        computed, cached, served = [], [], []
        for number in range(self._repeats):
            tokens = prompt(length, number)
            first, self._computed[length, number], _ = self._engine.ask(tokens)
            computed.append(first)
            first, answer, hit = self._engine.ask(tokens, forget=False)
            cached.append(first)
            served.append(hit)
            self._cached[length, number] = answer
        equal = [
            answer == self._cached[at] for at, answer in self._computed.items() if at[0] == length
        ]
        self._results.add("computed", length=length, **milliseconds(computed))
        self._results.add("cached", length=length, served=served, **milliseconds(cached))
        self._results.add("rounding", length=length, computed_equals_cached=equal)

    def _load(self, length: int) -> None:
        took, served, equal, same = [], [], [], []
        for number in range(LOADS):
            at = length, number % self._repeats
            first, answer, hit = self._engine.ask(prompt(*at))
            took.append(first)
            served.append(hit)
            equal.append(answer == self._cached[at])
            same.append(answer == self._computed[at])
        self._results.add("loaded", length=length, served=served, **milliseconds(took))
        self._results.add("equal", length=length, cached=equal, computed=same)
        if not all(equal):
            self._results.failed.append(f"answers after loading {length}")

    def _gaps(self, what: str, tokens: list[int]) -> None:
        """Times between tokens of requests that run before and while another one begins."""
        engine = self._engine
        engine.forget()
        before_asked, bound_s = (30, 6 * GAPS_S) if self._job.cpu else (GAPS_BEFORE, GAPS_S)
        counts = {engine.add(prompt(1024, f"decode {n}", n), 1500): 0 for n in range(RUNNING)}
        stamps: list[float] = []
        asked = first = 0.0
        other, served = "", 0
        end = time.monotonic() + bound_s
        while not first or sum(stamp > first for stamp in stamps) < before_asked // 3:
            if time.monotonic() > end:
                break
            outputs, now, has_moved = engine.step(), time.perf_counter(), False
            for output in outputs:
                count = len(output.outputs[0].token_ids)
                if output.request_id != other:
                    has_moved |= count > counts[output.request_id]
                    counts[output.request_id] = count
                elif count and not first:
                    first, served = now, output.num_cached_tokens or 0
            if has_moved and min(counts.values()):
                stamps.append(now)
            if not other and len(stamps) > before_asked:
                asked, other = time.perf_counter(), engine.add(tokens, 4)
        engine.engine.abort_request([*counts, *([other] if other else [])])
        if not first:
            raise RuntimeError(f"no first token of a request that {what}")
        gaps = [(at, later - at) for at, later in pairwise(stamps)]
        before = [gap for at, gap in gaps[SETTLING:] if at < asked]
        during = [gap for at, gap in gaps if asked <= at + gap and at <= first]
        self._results.add("gaps", beside="nothing", **milliseconds(before))
        row = milliseconds(during) | {"served": served, "first_token_s": round(first - asked, 4)}
        self._results.add("gaps", beside=f"a prompt that {what}", length=len(tokens), **row)

    def _wait_saved(self, chunks: int) -> int:
        """Wait until so many payloads are stored, or none has come for 5 s. Returns how many."""
        found, last = -1, time.monotonic()
        while self._job.agent and found < chunks and time.monotonic() - last < 5:
            count = sum(1 for _ in (self._job.store / "chunks").rglob("*.safetensors"))
            if count != found:
                found, last = count, time.monotonic()
            time.sleep(0.05)
        return found


def main(path: str, text: str) -> None:
    """Run the job. The process does not wait for threads that others left."""
    given = json.loads(text)
    places = {name: Path(given[name]) for name in ("folder", "store")}
    job = Job(**given | places | {"lengths": tuple(given["lengths"])})
    results, status = Results(Path(path), job.stage), 1
    try:
        Session(job, results).run()
        status = bool(results.failed)
    except Exception as error:
        traceback.print_exc()
        results.add("error", error=f"{type(error).__name__}: {error}"[:600])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":  # a worker's process imports this module once more
    main(*sys.argv[1:])
