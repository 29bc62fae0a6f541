"""Measure how much loads disturb requests that decode: inter-token latency in a real engine.

    python -m benchmarks.latency [--rounds N] [--json]

Eight requests decode while another loads a prompt of a gigabyte from an S3 server by TLS, once by a
node agent and once by the replica itself. An engine step gives each of the eight a token, so the
duration of a step is their inter-token latency. Steps without a load are measured just before each
load. Where loads are resident in the agent's memory, nothing is fetched: shown too.

One model thread computes. The S3 server and the agent are kept on the machine's last processor,
since on a small machine they would else take the engine's, which is not what they do beside a GPU.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.agent import show, stores
from tests.engine.fleet import SAVED, SharedStore
from tests.engine.harness import ROOT, run_replica
from tests.engine.job import Call, Generate, Prompt, ResetPrefixCache
from tests.support.agents import AgentProcess

LENGTH = 8192
"""Tokens of the prompt that is loaded."""
LAYERS, HEADS, CONTENT = 8, 16, 128
NBYTES = LENGTH * LAYERS * HEADS * CONTENT * 2 * 4
"""Of the loaded KV, in float32: 1.07 GB."""
DECODING = 8
ALONE_STEPS = 100
"""Steps without a load, before each load."""
_PATIENCE_S = 600.0


def make_model() -> Path:
    """A model that computes little and has much KV."""
    target = ROOT / ".cache" / "models" / f"latency-{LAYERS}-{HEADS}-{CONTENT}"
    if not target.exists():
        import torch
        import transformers

        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=CONTENT,
            max_position_embeddings=2 * LENGTH,
        )
        partial = target.with_suffix(f".{os.getpid()}")
        transformers.LlamaForCausalLM(config).save_pretrained(partial)
        partial.rename(target)
    return target


def tokens_of(seed: int, length: int) -> list[int]:
    """A prompt."""
    source = random.Random(seed)
    return [source.randrange(3, 1024) for _ in range(length)]


def measure(llm: Any, seeds: list[int], rounds: int) -> dict[str, Any]:
    """Runs in the replica: durations of steps in seconds, without and during loads of one of the
    prompts, which take turns."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    endless = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=4096)
    one = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=1)
    alone: list[float] = []
    during: list[float] = []
    loads: list[float] = []
    for number in range(rounds * len(seeds)):
        names = [f"d{number}-{each}" for each in range(DECODING)]
        for each, name in enumerate(names):
            prompt = {"prompt_token_ids": tokens_of(1000 + DECODING * number + each, 64)}
            engine.add_request(name, prompt, endless)
        for _ in range(4):
            engine.step()
        alone += [_step(engine)[0] for _ in range(ALONE_STEPS)]
        prompt = {"prompt_token_ids": tokens_of(seeds[number % len(seeds)], LENGTH + 1)}
        begun = time.perf_counter()
        engine.add_request(f"l{number}", prompt, one)
        steps, loaded = [], None
        while loaded is None:
            seconds, outputs = _step(engine)
            steps.append(seconds)
            loaded = next((one for one in outputs if one.request_id == f"l{number}"), None)
        loads.append(time.perf_counter() - begun)
        assert loaded.num_cached_tokens == LENGTH, loaded.num_cached_tokens
        during += steps[:-1]  # the last one computes the prompt's last token
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        assert llm.reset_prefix_cache()
    return {"alone": alone, "during": during, "loads": loads}


def _step(engine: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    outputs = engine.step()
    return time.perf_counter() - begun, outputs


def replica(steps: list[Any], settings: dict[str, str], folder: Path) -> Any:
    """Run an engine."""
    engine = {
        "model": str(make_model()),
        "max_model_len": LENGTH + 64,
        "kv_cache_memory_bytes": NBYTES * 3 // 2,
        "max_num_seqs": DECODING + 2,
    }
    made = SharedStore(folder / "none").job(*steps, engine=engine, chunk_tokens=256, **settings)
    return run_replica(made.model_copy(update={"timeout_s": _PATIENCE_S * 6}), folder)


def summary(answer: dict[str, list[float]]) -> dict[str, float]:
    """What one engine saw."""
    alone, during = sorted(answer["alone"]), sorted(answer["during"])

    def at(steps: list[float], share: float) -> float:
        return steps[min(len(steps) - 1, int(share * len(steps)))]

    return {
        "steps_alone": len(alone),
        "steps_during": len(during),
        "alone_p50_ms": 1e3 * at(alone, 0.5),
        "alone_p99_ms": 1e3 * at(alone, 0.99),
        "p50": at(during, 0.5) / at(alone, 0.5),
        "p99": at(during, 0.99) / at(alone, 0.99),
        "load_gb_per_s": NBYTES / 1e9 / statistics.median(answer["loads"]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of two loads each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(everywhere)})
        urls = stores(stack, folder, tls=True)
        small, large = str(NBYTES * 5 // 4), str(NBYTES * 5 // 2)
        agents = {
            name: stack.enter_context(AgentProcess(urls | {"agent_memory_bytes": nbytes}))
            for name, nbytes in (("agent", small), ("resident", large))
        }
        os.sched_setaffinity(0, everywhere)
        seeds = [1, 2]
        prompts = [
            Prompt(tokens=tuple(tokens_of(seed, LENGTH + 1)), max_tokens=1) for seed in seeds
        ]
        saves: list[Any] = []
        for prompt in prompts:
            saves += [Generate(prompts=(prompt,)), SAVED, ResetPrefixCache()]
        replica(saves, urls | {"codec": "none"}, folder)
        arguments = {"seeds": seeds, "rounds": options.rounds}
        look = Call(function="benchmarks.latency:measure", arguments=arguments)
        sides = {name: {"agent": agent.url} for name, agent in agents.items()} | {"own": {}}
        answers: dict[str, dict[str, list[float]]] = {}
        for _ in range(2):
            for name, settings in sides.items():
                answer = replica([look], urls | settings, folder).answers[0]
                kept = answers.setdefault(name, {key: [] for key in answer})
                for key, values in answer.items():
                    kept[key] += values
        found = {name: summary(answer) for name, answer in answers.items()}
    show(found, as_json=options.json)


if __name__ == "__main__":
    main()
