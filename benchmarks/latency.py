"""Measure how much loads disturb requests that decode: inter-token latency in a real engine.

    python -m benchmarks.latency [--rounds N] [--json]

Eight requests decode while another loads a prompt of a gigabyte, once by an agent that fetches it
from an S3 server by TLS, and once by one that has it in memory. An engine step gives each of the
eight a token, so the duration of a step is their inter-token latency. Steps without a load are
measured just before each load.

One model thread computes. The S3 server and the agent are kept on the machine's last processor,
since on a small machine they would else take the engine's, which is not what they do beside a GPU.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.agent import show
from benchmarks.harness import QUICK_S3
from tests.engine.fleet import RESET, SAVED, SharedStore
from tests.engine.harness import ROOT, run_replica
from tests.engine.job import Call, Prompt, generate
from tests.support.agents import AgentProcess, metrics_of
from tests.support.servers.certificates import make_certificates
from tests.support.servers.quick_s3 import quick_s3_process
from tests.support.waiting import wait_until

LENGTH, CHUNK = 8192, 256
"""Tokens of the prompt that is loaded, and of its chunks."""
LAYERS, HEADS, CONTENT = 8, 16, 128
TOKEN_NBYTES = LAYERS * HEADS * CONTENT * 2 * 4
"""Of a token's KV, in float32: 1.07 GB for the prompt."""
DECODING = 8
DECODED_MAX = 512
"""Tokens of each of them."""
TURNS = 2
"""Of each side."""
ALONE_STEPS = 100
"""Steps without a load, before each load."""
_PATIENCE_S = 600.0


def make_model() -> Path:
    """A model that computes little and has much KV."""
    target = ROOT / ".cache" / "models" / f"latency-{LENGTH}-{LAYERS}-{HEADS}-{CONTENT}"
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


def stores(stack: ExitStack, folder: Path) -> dict[str, str]:
    """Settings of agents over an S3 server on loopback behind TLS."""
    certificates = make_certificates(folder / "tls")
    server = stack.enter_context(quick_s3_process(tls=certificates))
    return {
        "index_url": f"sqlite://{folder}/i",
        "bulk_url": "s3://bench/kv",
        "s3_endpoint_url": server.url,
        **QUICK_S3,
        "s3_ca_bundle": str(certificates / "ca.pem"),
        "save_to_bucket": "all",
    }


def measure(llm: Any, seeds: list[int], rounds: int, lengths: list[int]) -> dict[str, Any]:
    """Runs in the replica: durations of steps in seconds, without and during loads of one of the
    prompts, which take turns. ``lengths``: tokens of a prompt and of a chunk."""
    from vllm import SamplingParams

    engine, (length, chunk) = llm.llm_engine, lengths
    endless = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=4096)
    one = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=1)
    found: dict[str, list[float]] = {"alone": [], "during": [], "loads": []}
    for number in range(rounds * len(seeds)):
        # Those that decode are new ones: the longer they are, the less room has a load.
        names = [f"d{number * DECODING + each}" for each in range(DECODING)]
        for name in names:
            # Less than a chunk: what is saved would take memory of the agent that loads need.
            tokens = tokens_of(1000 + int(name[1:]), chunk // 4)
            engine.add_request(name, {"prompt_token_ids": tokens}, endless)
        for _ in range(4):
            engine.step()
        found["alone"] += [_step(engine)[0] for _ in range(ALONE_STEPS)]
        prompt = {"prompt_token_ids": tokens_of(seeds[number % len(seeds)], length + 1)}
        begun = time.perf_counter()
        engine.add_request(f"l{number}", prompt, one)
        steps, loaded = list[float](), None
        while loaded is None:
            seconds, outputs = _step(engine)
            steps.append(seconds)
            loaded = next((one for one in outputs if one.request_id == f"l{number}"), None)
        found["loads"].append(time.perf_counter() - begun)
        assert loaded.num_cached_tokens == length, loaded.num_cached_tokens
        found["during"] += steps[:-1]  # the last one computes the prompt's last token
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        assert llm.reset_prefix_cache()
    return found


def _step(engine: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    outputs = engine.step()
    return time.perf_counter() - begun, outputs


def replica(steps: list[Any], settings: dict[str, Any], folder: Path) -> Any:
    """Run an engine."""
    engine = {
        "model": str(make_model()),
        "max_model_len": LENGTH + 64,
        "kv_cache_memory_bytes": (LENGTH + DECODING * DECODED_MAX) * TOKEN_NBYTES,
        "max_num_seqs": DECODING + 2,
    }
    made = SharedStore(folder / "none").job(*steps, engine=engine, chunk_tokens=CHUNK, **settings)
    return run_replica(made.model_copy(update={"timeout_s": _PATIENCE_S * 6}), folder)


def summary(answer: dict[str, list[float]]) -> dict[str, float]:
    """What one engine saw."""
    alone, during = sorted(answer["alone"]), sorted(answer["during"])
    gigabytes = LENGTH * TOKEN_NBYTES / 1e9

    def at(steps: list[float], share: float) -> float:
        return steps[min(len(steps) - 1, int(share * len(steps)))]

    return {
        "alone_p50_ms": 1e3 * at(alone, 0.5),
        "alone_p99_ms": 1e3 * at(alone, 0.99),
        "p50": at(during, 0.5) / at(alone, 0.5),
        "p99": at(during, 0.99) / at(alone, 0.99),
        "load_gb_per_s": gigabytes / statistics.median(answer["loads"]),
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
        urls = stores(stack, folder)
        nbytes = LENGTH * TOKEN_NBYTES
        small, large = str(nbytes * 5 // 4), str(nbytes * 5 // 2)
        agents = {
            name: stack.enter_context(
                AgentProcess(urls | {"agent_memory_bytes": memory, "codec": "none"}, fresh=True)
            )
            for name, memory in (("agent", small), ("resident", large))
        }
        os.sched_setaffinity(0, everywhere)
        seeds, saves = [1, 2], list[Any]()
        for seed in seeds:
            prompt = Prompt(tokens=tuple(tokens_of(seed, LENGTH + 1)), max_tokens=1)
            saves += [generate(prompt), SAVED, RESET]
        # With less, a step that computes several chunks drops some of them.
        slabs = {"pinned_bytes_max": 2 * nbytes}
        replica(saves, slabs | {"agent": agents["resident"].url}, folder)
        chunks, keeper = len(seeds) * (LENGTH // CHUNK), agents["resident"].path
        wait_until(lambda: metrics_of(keeper)["saves_total"] >= chunks)
        arguments = {"seeds": seeds, "rounds": options.rounds, "lengths": [LENGTH, CHUNK]}
        look = Call(function="benchmarks.latency:measure", arguments=arguments)
        answers = {name: defaultdict[str, list[float]](list) for name in agents}
        for name, agent in [*agents.items()] * TURNS:
            answer = replica([look], {"agent": agent.url}, folder).answers[0]
            for key, values in answer.items():
                answers[name][key] += values
        found = {name: summary(answer) for name, answer in answers.items()}
    show(found, as_json=options.json)


if __name__ == "__main__":
    main()
