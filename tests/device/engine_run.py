"""A real vLLM engine whose paged cache is in the memory of the simulated device.

``python -m tests.device.engine_run 6`` runs 6 rounds of prompts and prints a JSON line. With names
of mutants as further arguments, it then runs each of them, with prompts of its own and a line each.

The model computes on the CPU, in the kernels' view of the cache, while objkv's lanes use the
device, each of whose operations takes milliseconds. Whatever the compute stream must wait for, the
model waits for. After each round all blocks are free and filled with nonsense, so that a copy that
comes too late, or from a block that was freed too early, is wrong.
"""

import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from objkv.transfer.loading.loader import Loader
from objkv.transfer.plan import ChunkMove, LoadOutcome, LoadPlan, SavePlan
from objkv.transfer.saver import Saver
from tests.device import simulated
from tests.device.mutants import MUTANTS
from tests.engine.fleet import settle
from tests.engine.job import Job, Output, Prompt, tokens_of
from tests.engine.replica import Driver, arguments
from tests.support.agents import AgentProcess
from tests.support.plans import unpacked
from tests.support.waiting import wait_until

SLOW_US, SAVE_US = (500, 2500), 400_000
"""How long each operation of a lane takes, at least and at most, and how long a save waits before
it reads its blocks: until after the next two steps, even on a busy machine."""
CHUNK_TOKENS, PROMPTS = 160, 4
PROMPT_TOKENS = 2 * CHUNK_TOKENS
BLOCKS = 41
"""Just enough for all prompts, and none is left for their answers: then some are preempted while
they are saved. One is vLLM's null block."""
ANSWER_TOKENS = 24
SAVED_ANSWERS = (4, 1)
"""Tokens of the answers while prompts are saved. After one token, prompts end while they are."""
ROUNDS_EACH, MUTANT_ROUNDS, LOOKUP_S = 3, 24, 0.1
NONSENSE = 0x41
"""Bytes of freed blocks: finite numbers in every dtype, far from any of the model's."""
PATIENCE_S = 120.0
AGENT = {"agent_memory_bytes": "64MiB", "save_deadline_ms": "600s"}
_DEVICE = "sim:0"


@dataclass
class Cache:
    """The paged cache, as the device's tensors and as the model's."""

    on_device: dict[str, torch.Tensor] = field(default_factory=dict)
    in_model: dict[str, torch.Tensor] = field(default_factory=dict)

    def allocate(self, allocate: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., Any]:
        """vLLM's function that allocates the cache, on the simulated device."""

        def allocated(config: Any, device: torch.device, *args: Any) -> dict[str, torch.Tensor]:
            self.on_device = allocate(config, torch.device(_DEVICE), *args)
            let_model_wait()
            self.in_model = {n: simulated.kernel_view(t) for n, t in self.on_device.items()}
            return dict(self.in_model)

        return allocated

    def spoil(self) -> None:
        for tensor in self.in_model.values():
            tensor.view(torch.uint8).fill_(NONSENSE)

    def page(self, layer: str, block_id: int) -> bytes:
        """A digest of one block of a layer, as the model would read it now."""
        found = self.in_model[layer][block_id].contiguous().view(torch.uint8)
        return hashlib.sha256(found.numpy().tobytes()).digest()


def let_model_wait() -> None:
    """Block until the device has done what the compute stream must wait for."""
    simulated.default_stream(_DEVICE).synchronize()


class Witness:
    """Compares what loads bring with what saves took, byte for byte."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._saved: defaultdict[tuple[bytes, int, str], set[bytes]] = defaultdict(set)
        """Pages by prefix hash, block of the chunk, and layer."""
        self._plans: dict[str, LoadPlan] = {}
        self.compared = self.wrong = 0

    def open_saver(self, target: Any, groups: Any, *given: Any, lane: Any, **named: Any) -> Saver:
        self._layers = {g: group.shape.layers for g, group in groups.items()}
        self._lane = lane
        self._saver = Saver(target, groups, *given, lane=lane, **named)
        return self._saver

    def watch(self, loader: Loader) -> None:
        """Look at all plans and outcomes from now on. Mutants replace methods of the classes, so
        this replaces those of the objects."""

        def gather(plans: tuple[SavePlan, ...]) -> Any:
            for move in (save.move for plan in plans for save in plan.moves):
                for place, page in self._pages(move):
                    self._saved[place].add(page)
            if plans:
                with torch.get_device_module(_DEVICE).stream(self._lane.stream):
                    simulated.sleep(SAVE_US)
            return Saver.gather(self._saver, plans)

        def submit(plan: LoadPlan, *args: Any) -> None:
            self._plans[plan.request_id] = plan
            Loader.submit(loader, plan, *args)

        def take_finished(*, sync: bool) -> list[LoadOutcome]:
            outcomes = Loader.take_finished(loader, sync=sync)
            if sync:
                let_model_wait()
            for outcome in outcomes:
                self._compare(self._plans.pop(outcome.request_id), outcome)
            return outcomes

        vars(loader).update(submit=submit, take_finished=take_finished)
        vars(self._saver).update(gather=gather)

    def _compare(self, plan: LoadPlan, outcome: LoadOutcome) -> None:
        for move in (load.move for load in unpacked(plan.moves)):
            if outcome.failed_blocks.isdisjoint(move.block_ids):
                for place, page in self._pages(move):
                    self.compared += 1
                    self.wrong += page not in self._saved[place]

    def _pages(self, move: ChunkMove) -> Iterator[tuple[tuple[bytes, int, str], bytes]]:
        for number, block_id in enumerate(move.block_ids, move.first_block):
            for layer in self._layers[move.group]:
                page = self._cache.page(layer, block_id)
                yield (move.prefix_hash, number, layer), page


class _Driver(Driver):
    """The index answers before the first step, so that one step admits all prompts."""

    def _submit(self, prompt: Prompt) -> str:
        name = super()._submit(prompt)
        time.sleep(LOOKUP_S)
        return name


class Engine:
    def __init__(self, agent: AgentProcess) -> None:
        import vllm
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.worker import gpu_model_runner as runner

        from objkv.connector import ObjKVConnector
        from objkv.connector.kv import wiring

        self.cache = Cache()
        self.witness = Witness(self.cache)
        register = ObjKVConnector.register_kv_caches
        for name in ("start_load_kv", "wait_for_layer_load", "wait_for_save", "handle_preemptions"):
            setattr(ObjKVConnector, name, _then_model_waits(getattr(ObjKVConnector, name)))

        def register_on_device(connector: ObjKVConnector, kv_caches: dict[str, Any]) -> None:
            assert kv_caches.keys() == self.cache.on_device.keys()
            register(connector, self.cache.on_device)

        allocate = self.cache.allocate(runner.allocate_kv_cache)
        with (
            patch.object(runner, "allocate_kv_cache", allocate),
            patch.object(ObjKVConnector, "register_kv_caches", register_on_device),
            patch.object(wiring, "Saver", self.witness.open_saver),
        ):
            self._llm = vllm.LLM(**arguments(_job(agent)))
        self._agent = agent
        self._driver = _Driver(self._llm.llm_engine)
        connector: Any = get_kv_transfer_group()
        self._worker = connector.worker
        self.witness.watch(self._worker.loader)
        simulated.slow(_DEVICE, *SLOW_US)
        simulated.slow(simulated.default_stream(_DEVICE), 0, 0)

    def round(
        self,
        prompts: list[tuple[int, ...]],
        answer_tokens: int,
        *,
        salt: str | None = None,
        aborted: int | None = None,
    ) -> tuple[Output, ...]:
        """Run prompts at once. At the end all blocks are free, and nonsense. ``aborted``: index of
        the prompt that is aborted after some steps."""
        asked = (
            Prompt(
                tokens=tokens,
                max_tokens=answer_tokens,
                cache_salt=salt,
                abort_after_steps=3 if number == aborted else None,
            )
            for number, tokens in enumerate(prompts)
        )
        outputs = self._driver.generate(tuple(asked))
        settle(self._llm)
        end = time.monotonic() + PATIENCE_S
        while not self._llm.reset_prefix_cache():
            assert time.monotonic() < end, "blocks that are still in use"
            self._llm.llm_engine.step()
        self.cache.spoil()
        assert self._worker.saver.drain(PATIENCE_S)
        wait_until(lambda: not self._agent.metrics()["unsaved_payloads"])
        return outputs


def _then_model_waits(method: Callable[..., Any]) -> Callable[..., Any]:
    def waited(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            let_model_wait()

    return waited


def _job(agent: AgentProcess) -> Job:
    extra = {
        "load_mode": "async",
        "admission": "always",
        "chunk_tokens": CHUNK_TOKENS,
        "agent": agent.url,
    }
    transfer = {
        "kv_connector": "ObjKVConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "objkv.connector",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": "recompute",
    }
    engine = {
        "max_model_len": 512,
        "max_num_seqs": PROMPTS,
        "num_gpu_blocks_override": BLOCKS,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return Job(steps=(), connector=transfer, engine=engine)


@dataclass
class Verdict:
    mutant: str = ""
    rounds: int = 0
    equal: int = 0
    """Rounds whose answers had the same tokens as when they were computed."""
    hit_share: float = 0.0
    """Tokens that were not computed, of all that have been stored."""
    compared: int = 0
    """Pages of layers that loads brought."""
    wrong: int = 0
    """Those of them that were never saved so."""
    fault: str = ""

    @property
    def is_right(self) -> bool:
        return self.equal == self.rounds and not self.wrong and not self.fault


def judge(engine: Engine, rounds: int, *, seed: int, name: str = "") -> Verdict:
    """Run rounds of prompts that have been stored. Every ``ROUNDS_EACH`` rounds there are others:
    they are computed for the answers, and then computed and saved. Returns at the first round that
    is wrong."""
    verdict, possible = Verdict(name), 0
    engine.witness.compared = engine.witness.wrong = 0
    try:
        for number in range(rounds):
            nth, at = divmod(number, ROUNDS_EACH)
            if at == 0:
                seeds = range((seed + nth) * PROMPTS, (seed + nth + 1) * PROMPTS)
                prompts = [tokens_of(PROMPT_TOKENS, seed=each) for each in seeds]
                cold = engine.round(prompts, ANSWER_TOKENS, salt=f"computed {seed + nth}")
                assert not any(one.cached_tokens for one in cold)
                engine.round(prompts, SAVED_ANSWERS[nth % len(SAVED_ANSWERS)])
            aborted = number % PROMPTS if at == ROUNDS_EACH - 1 else None
            warm = engine.round(prompts, ANSWER_TOKENS, aborted=aborted)
            pairs = [pair for n, pair in enumerate(zip(warm, cold, strict=True)) if n != aborted]
            verdict.rounds += 1
            verdict.equal += all(a.tokens == b.tokens for a, b in pairs)
            verdict.hit_share += sum(a.cached_tokens or 0 for a, _ in pairs)
            possible += len(pairs) * PROMPT_TOKENS
            verdict.compared, verdict.wrong = engine.witness.compared, engine.witness.wrong
            if not verdict.is_right:
                break
    except Exception as error:
        verdict.fault = f"{type(error).__name__}: {error}"[:200]
    verdict.hit_share /= possible or 1
    verdict.fault = verdict.fault or simulated.take_error()
    return verdict


def main() -> None:
    count, *names = sys.argv[1:]
    simulated.load()
    simulated.seed(1)
    mutants = [None, *(one for one in MUTANTS if one.name in names)]
    with tempfile.TemporaryDirectory(prefix="objkv-") as folder, ExitStack() as stack:
        stores = {
            "bulk_url": f"file://{folder}/chunks",
            "index_url": f"sqlite:///{folder}/index.sqlite",
        }
        agent = stack.enter_context(AgentProcess(stores | AGENT, fresh=True))
        engine = Engine(agent)
        for number, mutant in enumerate(mutants):
            if mutant is None:
                verdict = judge(engine, int(count), seed=0)
            else:
                logging.disable(logging.CRITICAL)
                with mutant.applied():
                    verdict = judge(engine, MUTANT_ROUNDS, seed=100 * number, name=mutant.name)
            print(json.dumps(asdict(verdict)), flush=True)
        agent.kill()
        sys.stdout.flush()
        os._exit(0)  # a mutant may have left anything behind


if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    main()
