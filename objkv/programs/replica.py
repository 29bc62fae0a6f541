"""One replica of ``demo`` or ``gpu-check``: an engine that answers one prompt after the other.

``python -m objkv.programs.replica SETUP`` takes a ``ReplicaSetup`` as JSON and prints one
``ReplicaEvent`` per line; vLLM's output goes to standard error.
"""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from objkv.ops import replica
from objkv.ops.replica import ANSWER_TOKENS, ReplicaAnswer, ReplicaEvent, ReplicaSetup, Shape

KV_CACHE_BYTES: Final = 256 << 20
"""Enough for several prompts, and small enough to leave most of the machine's memory free."""
_MEMORY_SHARE = 0.6
"""Of a GPU's memory, for an engine with vLLM's defaults: other programs may use some."""
_SHAPES: Final[dict[Shape, dict[str, int]]] = {
    "normal": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4},
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3},
    "gpu": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
    },
}
_HEAD = 64
_FORGET_S = 30.0


def make_model(folder: Path, shape: Shape, longest: int) -> Path:
    """Create a Llama with random weights and heads of 64 in ``folder`` unless it exists. Safe with
    concurrent callers: each gets a complete model. ``longest``: length in tokens of the longest
    prompt with its answer."""
    dtype = "bfloat16" if shape == "gpu" else "float32"
    recipe = f"{_SHAPES[shape]} {replica.VOCABULARY} {longest} {dtype} {version('transformers')}"
    target = folder / f"{shape}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if target.exists():
        return target
    partial = target.with_suffix(f".{os.getpid()}")
    _save(_SHAPES[shape], longest, dtype, partial)
    try:
        partial.rename(target)
    except OSError:  # another process was faster; models from the same seed are equal
        shutil.rmtree(partial)
    return target


def _save(shape: dict[str, int], longest: int, dtype: str, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(20)
    config = transformers.LlamaConfig(
        **{"num_key_value_heads": 2, **shape},
        vocab_size=replica.VOCABULARY,
        num_attention_heads=shape["hidden_size"] // _HEAD,
        head_dim=_HEAD,
        max_position_embeddings=longest,
        # 0.02 is usual. With 0.08, wrong KV changes the answers, so equal answers prove equal KV.
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    folder.mkdir(parents=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def device() -> str:
    """Return the name of the GPU or processor that vLLM uses here."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'a CPU'}"


class ReplicaEngine:
    """A ``vllm.LLM`` that answers one prompt at a time."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._asked = 0

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, which would otherwise serve repeated prompts."""
        deadline = time.monotonic() + _FORGET_S
        core = getattr(self._engine.engine_core, "engine_core", None)
        while not self._llm.reset_prefix_cache():
            # Blocks of the last prompt stay in use until its saves have read them, which vLLM
            # learns in a step.
            if time.monotonic() > deadline:
                raise RuntimeError("vLLM could not reset its prefix cache: blocks are in use")
            if core is not None:  # in this process, and makes no steps of its own
                self._engine.step()
            time.sleep(0.01)

    def ask(self, name: str, tokens: Sequence[int], *, forget: bool = True) -> ReplicaAnswer:
        """Return the greedy answer. ``forget``: empty the engine's own prefix cache before."""
        from vllm import SamplingParams

        if forget:
            self.forget()
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
        return ReplicaAnswer(
            prompt=name,
            tokens=tuple(output.outputs[0].token_ids),
            served_tokens=output.num_cached_tokens or 0,
            first_token_s=first_token_s,
        )


def engine_arguments(model: str, longest: int) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``: small and quick to start, otherwise the defaults."""
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        # The order of sums depends on the number of computed tokens. With fewer bits, the rounding
        # would change the answers of a random model.
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "seed": 0,
    }
    if current_platform.is_cpu():
        # One process starts in a third of the time.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments["distributed_executor_backend"] = "uni"
    return arguments


def arguments_of(setup: ReplicaSetup) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``, with the model, which is created if need be."""
    from vllm.platforms import current_platform

    is_light = setup.shape != "gpu" or current_platform.is_cpu()
    longest = setup.longest + ANSWER_TOKENS
    shape: Shape = "small" if is_light and setup.shape == "gpu" else setup.shape
    model = setup.model or str(make_model(setup.models, shape, longest))
    arguments = engine_arguments(model, longest)
    if not is_light:
        for name in ("enforce_eager", "kv_cache_memory_bytes", "max_num_batched_tokens"):
            del arguments[name]
        arguments |= {"dtype": "auto", "gpu_memory_utilization": _MEMORY_SHARE}
    if setup.role != "R":
        arguments["kv_transfer_config"] = replica.CONNECTOR
    return arguments


def run(setup: ReplicaSetup, send: Callable[[ReplicaEvent], None]) -> None:
    """Run a replica from start to end in this process."""

    def begin(stage: str) -> None:
        send(ReplicaEvent(stage=stage))

    begin("importing vLLM")
    import vllm

    begin("making the model")
    arguments = arguments_of(setup)
    begin("starting the engine")
    llm = vllm.LLM(**arguments, disable_log_stats=False)
    engine = ReplicaEngine(llm)
    begin("warming up")  # absorbs one-time costs
    engine.ask("warm-up", replica.random_tokens("warm-up", setup.longest))
    for prompt in setup.prompts:
        begin(f"answering {prompt.name}")
        answer = engine.ask(prompt.name, prompt.tokens, forget=prompt.forget)
        send(ReplicaEvent(answer=answer))
    failures = (m.value for m in llm.get_metrics() if m.name == "vllm:objkv_load_failures")
    end = replica.ReplicaEnd(
        engine=f"vLLM {vllm.__version__}", device=device(), load_failures=int(sum(failures))
    )
    begin("stopping")
    llm.llm_engine.engine_core.shutdown()
    send(ReplicaEvent(end=end))


def main() -> None:
    """Run a replica with its events on standard output, and vLLM's on standard error."""
    with os.fdopen(os.dup(1), "w") as events:
        os.dup2(2, 1)

        def send(event: ReplicaEvent) -> None:
            events.write(event.model_dump_json(exclude_none=True) + "\n")
            events.flush()

        run(ReplicaSetup.model_validate_json(sys.argv[1]), send)


if __name__ == "__main__":  # spawned worker processes import this file again
    main()
