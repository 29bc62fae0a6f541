"""Measure how much loads disturb requests that decode: inter-token latency in a real engine.

    python -m benchmarks.latency [--rounds N] [--json]

Eight requests decode while another loads a prompt of a gigabyte, once by an agent that fetches it
from an S3 server by TLS, and once by one that has it in memory. An engine step gives each of the
eight a token, so the duration of a step is their inter-token latency. Steps without a load are
measured just before each load.

``beside`` are the steps while a process that is no engine has the agent fetch such a prompt: what
work on the machine's other processor takes from this one.

``waits_...`` is the share of that time for which the engine's thread could have run, but another
thread had its processor. ``other_threads_s_per_gb`` is the processor time of the engine's other
threads during a load, which copy. The rest of what steps take longer is a processor that is slower
while its neighbour works.

One model thread computes. The S3 server and the agent are kept on the machine's last processor,
since on a small machine they would else take the engine's, which is not what they do beside a GPU.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.agent import show
from benchmarks.worker import stores
from objkv.agent.client import AgentConnection, leases_of
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import Claims, Opening, Urgency, pack_opening, unpack_opening
from objkv.codec.payload import Claim
from tests.engine.fleet import SAVED, SharedStore
from tests.engine.harness import ROOT, run_replica
from tests.engine.job import Call, Generate, Prompt, ResetPrefixCache
from tests.support.agents import AgentProcess, metrics_of
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


class Bystander:
    """A process that is no engine, and has the agent fetch the first prompt of this replica."""

    def __init__(self, socket: str, chunks: int) -> None:
        self._socket = socket
        self._chunks = chunks
        self._wanted: dict[str, Claim] = {}
        """Of the first two prompts."""
        open_ = AgentConnection.open

        def remember(agent: AgentConnection, wanted: Claims, **how: Any) -> Any:
            if len(self._wanted) < 2 * chunks:
                claims = map(wanted.claim, wanted)
                self._wanted |= {one.key.path(): one for one in claims}
            return open_(agent, wanted, **how)

        mock.patch.object(AgentConnection, "open", remember).start()

    def begin(self) -> "subprocess.Popen[bytes]":
        """Start to fetch. The process ends when the last payload has arrived."""
        claims = Claims.of(list(self._wanted.values()))
        opening = Opening(Urgency.BETWEEN_STEPS, 60_000, claims)
        assert len(opening.wanted) == 2 * self._chunks
        command = [sys.executable, "-m", "benchmarks.latency", "--fetch", self._socket]
        child = subprocess.Popen([*command, pack_opening(opening).hex()], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.read(1)  # it begins
        return child


def fetch(socket: str, message: str) -> None:
    """Have the agent fetch the first half of some payloads, and wait for them. Before and after,
    nothing is leased: loads of the engine have the agent's memory for themselves."""
    path, claims = Path(socket), unpack_opening(bytes.fromhex(message)).wanted
    wanted = list(map(claims.claim, claims))
    first, second = wanted[: len(wanted) // 2], wanted[len(wanted) // 2 :]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    agent = AgentConnection(path, wants_arena=True)

    def read(prompt: Sequence[Claim]) -> float:
        """Wait for all of a prompt. Returns how many payloads the agent had to fetch."""
        wait_until(lambda: not metrics_of(path)["leased_bytes"])
        before = metrics_of(path)["fills_total"]
        claims = Claims.of(prompt)
        opened = agent.open(claims, deadline_s=60.0, urgency=Urgency.BETWEEN_STEPS)
        leases = leases_of(opened, agent.arena.board)
        assert all(lease.number for lease in leases), "no room"
        left = [lease for lease in leases if lease.progress.state is CellState.FILLING]
        while left:
            agent.wait(60.0)
            states = [agent.arena.board.read(lease.cell).state for lease in left]
            assert CellState.FAILED not in states
            left = [
                one for one, state in zip(left, states, strict=True) if state is not CellState.READY
            ]
        fetched = metrics_of(path)["fills_total"] - before
        agent.release([lease.number for lease in leases])
        wait_until(lambda: not metrics_of(path)["leased_bytes"])
        return fetched

    read(second)  # all of it at once: there is no room for most of the first prompt then
    sys.stdout.write("b")
    sys.stdout.flush()
    assert read(first) > len(first) // 2, "the prompt was resident"


def measure(
    llm: Any, seeds: list[int], rounds: int, lengths: list[int], agent: str | None = None
) -> dict[str, Any]:
    """Runs in the replica: durations of steps in seconds, without and during loads of one of the
    prompts, which take turns. ``lengths``: tokens of a prompt and of a chunk. With the socket of an
    ``agent``, whose memory holds one prompt, also beside a process that has it fetch the first one,
    and then only the others are loaded."""
    from vllm import SamplingParams

    engine, (length, chunk) = llm.llm_engine, lengths
    bystander = None if agent is None else Bystander(agent, length // chunk)
    endless = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=4096)
    one = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=1)
    found: dict[str, list[float]] = {
        name: [] for name in ("alone", "during", "beside", "loads", "other_threads_s")
    }
    waits: dict[str, list[float]] = {f"waits_{name}": [] for name in ("alone", "during", "beside")}
    names: list[str] = []

    def decode_anew() -> None:
        """Those that decode are new ones: the longer they are, the less room has a load."""
        engine.abort_request(names)
        names[:] = [f"d{next(numbers)}" for _ in range(DECODING)]
        for name in names:
            # Less than a chunk: what is saved would take memory of the agent that loads need.
            tokens = tokens_of(1000 + int(name[1:]), chunk // 4)
            engine.add_request(name, {"prompt_token_ids": tokens}, endless)
        for _ in range(4):
            engine.step()

    numbers = count()
    for number in range(rounds * len(seeds)):
        seed = seeds[number % len(seeds) if bystander is None else min(number, 1)]
        decode_anew()
        before = Spent.now()
        found["alone"] += [_step(engine)[0] for _ in range(ALONE_STEPS)]
        waits["waits_alone"].append(before.until().waits)
        if bystander is not None and number > 1:  # the first prompt is not resident any more
            child = bystander.begin()
            before = Spent.now()
            while child.poll() is None:
                found["beside"].append(_step(engine)[0])
            waits["waits_beside"].append(before.until().waits)
            assert not child.returncode
            decode_anew()
        prompt = {"prompt_token_ids": tokens_of(seed, length + 1)}
        before = Spent.now()
        engine.add_request(f"l{number}", prompt, one)
        steps, loaded, spent = list[float](), None, before.until()
        while loaded is None:
            if steps:
                spent = before.until()
            seconds, outputs = _step(engine)
            steps.append(seconds)
            loaded = next((one for one in outputs if one.request_id == f"l{number}"), None)
        found["loads"].append(before.until().wall_s)
        assert loaded.num_cached_tokens == length, loaded.num_cached_tokens
        found["during"] += steps[:-1]  # the last one computes the prompt's last token
        waits["waits_during"].append(spent.waits)
        found["other_threads_s"].append(spent.others_s)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        assert llm.reset_prefix_cache()
    return found | waits


class Spent(NamedTuple):
    """What the calling thread and its process have spent."""

    wall_s: float
    waiting_s: float
    """Of this thread, for a processor."""
    others_s: float
    """Processor time of the process's other threads."""

    @classmethod
    def now(cls) -> "Spent":
        """Read the clocks."""
        ran_ns, waiting_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
        return cls(time.perf_counter(), waiting_ns / 1e9, time.process_time() - ran_ns / 1e9)

    def until(self) -> "Spent":
        """Return what was spent since this reading."""
        return Spent(*[b - a for a, b in zip(self, Spent.now(), strict=True)])

    @property
    def waits(self) -> float:
        """The share of the time for which this thread waited for a processor."""
        return self.waiting_s / max(self.wall_s, 1e-9)


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
    alone, during, beside = (sorted(answer[name]) for name in ("alone", "during", "beside"))
    gigabytes = LENGTH * TOKEN_NBYTES / 1e9

    def at(steps: list[float], share: float) -> float:
        return steps[min(len(steps) - 1, int(share * len(steps)))]

    found: dict[str, float] = {
        "steps_alone": len(alone),
        "steps_during": len(during),
        "alone_p50_ms": 1e3 * at(alone, 0.5),
        "alone_p99_ms": 1e3 * at(alone, 0.99),
        "p50": at(during, 0.5) / at(alone, 0.5),
        "p99": at(during, 0.99) / at(alone, 0.99),
        "load_gb_per_s": gigabytes / statistics.median(answer["loads"]),
        "waits_alone": statistics.median(answer["waits_alone"]),
        "waits_during": statistics.median(answer["waits_during"]),
        "other_threads_s_per_gb": statistics.median(answer["other_threads_s"]) / gigabytes,
    }
    if beside:
        found |= {
            "steps_beside": len(beside),
            "waits_beside": statistics.median(answer["waits_beside"]),
            "beside_p50": at(beside, 0.5) / at(alone, 0.5),
            "beside_p99": at(beside, 0.99) / at(alone, 0.99),
            "p50_to_beside": at(during, 0.5) / at(beside, 0.5),
            "p99_to_beside": at(during, 0.99) / at(beside, 0.99),
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of two loads each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fetch", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fetch:
        fetch(*options.fetch)
        return
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
        seeds = [1, 2]
        prompts = [
            Prompt(tokens=tuple(tokens_of(seed, LENGTH + 1)), max_tokens=1) for seed in seeds
        ]
        saves: list[Any] = []
        for prompt in prompts:
            saves += [Generate(prompts=(prompt,)), SAVED, ResetPrefixCache()]
        # With less, a step that computes several chunks drops some of them.
        slabs = {"pinned_bytes_max": 2 * nbytes}
        replica(saves, slabs | {"agent": agents["resident"].url}, folder)
        chunks, keeper = len(seeds) * (LENGTH // CHUNK), agents["resident"].path
        wait_until(lambda: metrics_of(keeper)["saves_total"] >= chunks)
        arguments = {"seeds": seeds, "rounds": options.rounds, "lengths": [LENGTH, CHUNK]}
        answers: dict[str, dict[str, list[float]]] = {}
        for _ in range(TURNS):
            for name, agent in agents.items():
                beside = {"agent": str(agent.path)} if name == "agent" else {}
                look = Call(function="benchmarks.latency:measure", arguments=arguments | beside)
                answer = replica([look], {"agent": agent.url}, folder).answers[0]
                kept = answers.setdefault(name, {key: [] for key in answer})
                for key, values in answer.items():
                    kept[key] += values
        found = {name: summary(answer) for name, answer in answers.items()}
    show(found, as_json=options.json)


if __name__ == "__main__":
    main()
