"""One engine, its times to the first token, and its answers:
``python -m scripts.gpu_engine.engine JOB`` prints one result a line."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from objkv.ops.replica import CONNECTOR, VOCABULARY, ReplicaAnswer, ReplicaPrompt
from objkv.programs.replica import ReplicaEngine

QUESTION_TOKENS, CHUNK_TOKENS = 8, 256
"""A question has fewer tokens than a block: a prefix cache ends where the document does."""
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
REPEATS, LOADS = 2, 4
RUNNING, GAPS, SETTLING, GAPS_S = 8, 120, 20, 300
"""Requests that decode while another one begins, how many of their steps are looked at and how many
of these are left out, and for how long at most."""
Report = Callable[..., None]
"""Prints a result, given its kind and its values."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one engine runs."""

    shape: str = "1b"
    has_objkv: bool = True
    own_process: bool = False
    """Whether EngineCore has a process of its own, as with ``vllm serve``."""
    lengths: tuple[int, ...] = ()
    """Tokens of documents."""
    folder: Path = Path()
    """Of model, payloads and index."""


def prompt(length: int, name: object, question: int = 0) -> ReplicaPrompt:
    """Return a question about a document."""
    texts = ((f"document {length} {name}", length), (f"question {question}", QUESTION_TOKENS))
    return ReplicaPrompt(name=f"{length} {name}", texts=texts)


def arguments_of(job: Job) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``, with a model without files of weights."""
    shape, kv_cache_bytes = SHAPES[job.shape]
    longest = max(job.lengths) + 2048
    model = job.folder / "model"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (model / "config.json").write_text(json.dumps(config | shape))
    found: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "worker_extension_cls": "scripts.gpu_engine.weights.Extension",
        "dtype": "float32" if job.shape == "tiny" else "bfloat16",
        "enforce_eager": True,
        "seed": 0,
        "max_num_seqs": 32,
        "max_model_len": longest,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "disable_log_stats": False,
    }
    if job.shape == "tiny":
        found["distributed_executor_backend"] = "uni"
    if job.has_objkv:
        found["kv_transfer_config"] = CONNECTOR
    return found


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return how many there are, their median, 99th percentile, and the largest."""
    if not seconds:
        return {"count": 0}
    values = sorted(round(1e3 * s, 3) for s in seconds)
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    median = round(statistics.median(values), 3)
    return {"count": len(values), "median_ms": median, "p99_ms": p99, "max_ms": values[-1]}


class Measurement:
    """All measurements with one engine."""

    def __init__(self, job: Job, report: Report) -> None:
        import vllm

        self._job, self._report = job, report
        self._llm: Any = vllm.LLM(**arguments_of(job))
        self._params = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
        self._replica = ReplicaEngine(self._llm)
        self._repeats = 1 if job.shape == "8b" else REPEATS
        self._cached: dict[str, tuple[int, ...]] = {}
        self._computed: dict[str, tuple[int, ...]] = {}
        """Answers by the prompt's name."""
        report("started", vllm=vllm.__version__)

    def run(self) -> None:
        """Warm up, and measure. Raises ``AssertionError`` after a wrong answer."""
        shortest, longest = min(self._job.lengths), max(self._job.lengths)
        for _ in range(2):  # the second time loads
            self._ask(prompt(longest, "warm-up"))
            self._wait_saved(longest // CHUNK_TOKENS)
        for length in self._job.lengths:
            self._compute(length)
        other = list(prompt(shortest, 0).tokens)
        other[10:200] = prompt(190, "another beginning").tokens[:190]
        answer = self._replica.ask("control", other).tokens
        assert answer != self._computed[f"{shortest} 0"], "answers do not depend on the document"
        if self._job.has_objkv:
            chunks = (longest + self._repeats * sum(self._job.lengths)) // CHUNK_TOKENS
            self._report("saved", at_least=chunks, found=self._wait_saved(chunks))
            for length in self._job.lengths:
                self._load(length)
            self._gaps("loads", prompt(longest, 0))
        self._gaps("is computed", prompt(longest, "new"))
        values = {m.name: m.value for m in self._llm.get_metrics() if "objkv" in m.name
                  and "fail" in m.name}  # fmt: skip
        self._report("failures", **values)
        self._llm.llm_engine.engine_core.shutdown()

    def _ask(self, asked: ReplicaPrompt, *, forget: bool = True) -> ReplicaAnswer:
        return self._replica.ask(asked.name, asked.tokens, forget=forget)

    def _compute(self, length: int) -> None:
        computed, cached = [], []
        for number in range(self._repeats):
            asked = prompt(length, number)
            computed.append(self._ask(asked))
            cached.append(self._ask(asked, forget=False))
            self._computed[asked.name] = computed[-1].tokens
            self._cached[asked.name] = cached[-1].tokens
        equal = [one.tokens == other.tokens for one, other in zip(computed, cached, strict=True)]
        self._answers("computed", length, computed)
        self._answers("cached", length, cached, rounding=equal)

    def _load(self, length: int) -> None:
        answers = [self._ask(prompt(length, n % self._repeats)) for n in range(LOADS)]
        equal = [one.tokens == self._cached[one.prompt] for one in answers]
        rounding = [one.tokens == self._computed[one.prompt] for one in answers]
        self._answers("loaded", length, answers, equal=equal, rounding=rounding)
        assert all(equal), f"answers after loading {length} tokens differ"

    def _answers(
        self, kind: str, length: int, answers: Sequence[ReplicaAnswer], **values: Any
    ) -> None:
        served = [one.served_tokens for one in answers]
        took = milliseconds([one.first_token_s for one in answers])
        self._report(kind, length=length, served=served, **took, **values)

    def _gaps(self, what: str, asked: ReplicaPrompt) -> None:
        """Measure times between tokens of requests that run before and while another begins."""
        engine = self._llm.llm_engine
        self._replica.forget()

        def add(name: str, tokens: Sequence[int], count: int) -> None:
            params = self._params.clone()
            params.max_tokens = count
            engine.add_request(name, {"prompt_token_ids": list(tokens)}, params)

        counts = {f"{what} {n}": 0 for n in range(RUNNING)}
        for n, name in enumerate(counts):
            add(name, prompt(1024, name, n).tokens, 1500)
        stamps: list[float] = []
        other, began, first, served = f"{what} other", 0.0, 0.0, 0
        end = time.monotonic() + GAPS_S
        while not first or sum(stamp > first for stamp in stamps) < GAPS // 3:
            assert time.monotonic() < end, f"no first token of a request that {what}"
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
            if not began and len(stamps) > GAPS + SETTLING:
                began = time.perf_counter()
                add(other, asked.tokens, 4)
        engine.abort_request([*counts, other])
        gaps = [(at, later - at) for at, later in pairwise(stamps)]
        before = [gap for at, gap in gaps[SETTLING:] if at < began]
        during = [gap for at, gap in gaps if began <= at + gap and at <= first]
        self._report("gaps", beside="nothing", **milliseconds(before))
        row = milliseconds(during) | {"served": served, "first_token_s": round(first - began, 4)}
        self._report("gaps", beside=f"a prompt that {what}", **row)

    def _wait_saved(self, chunks: int) -> int:
        """Wait until so many payloads are stored, or none has come for 5 s. Return how many."""
        found, last = -1, time.monotonic()
        while self._job.has_objkv and found < chunks and time.monotonic() - last < 5:
            count = sum(1 for _ in (self._job.folder / "chunks").rglob("*.safetensors"))
            if count != found:
                found, last = count, time.monotonic()
            time.sleep(0.05)
        return found


def main(text: str) -> None:
    """Run the job, with results on standard output, and vLLM's on standard error."""
    given = json.loads(text)
    job = Job(**given | {"folder": Path(given["folder"]), "lengths": tuple(given["lengths"])})
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)

        def report(kind: str, **values: Any) -> None:
            results.write(json.dumps({"kind": kind} | values) + "\n")
            results.flush()

        Measurement(job, report).run()


if __name__ == "__main__":  # a worker's process imports this module once more
    main(sys.argv[1])
