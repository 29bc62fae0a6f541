"""A random life of one replica, for ``Call`` steps: what an operator's month brings, in seconds.

Requests on shared stems come in bursts and go away, also in the middle of a step; the replica
forgets its own cache, or all that was stored; payloads are late, missing, refused and corrupt.
The caller compares nothing but what ``live`` counted.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

AT_ONCE_MAX = 12
FAULTS_OF_100 = 3
"""Reads of each kind of fault."""


@dataclass
class _Asked:
    number: int
    max_tokens: int


@dataclass
class _Counts:
    finished: int = 0
    cached_tokens: int = 0
    aborted: int = 0
    aborted_within_step: int = 0
    resets: int = 0
    wrong: list[str] = field(default_factory=list)


class _Life:
    def __init__(
        self, llm: Any, prompts: list[list[int]], expected: list[list[int]], seed: int
    ) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._prompts = prompts
        self._expected = expected
        self._dice = random.Random(seed)
        self._live: dict[str, _Asked] = {}
        self._gone: list[str] = []
        self._submitted = 0
        self.counts = _Counts()
        self._execute = self._core.model_executor.execute_model
        self._core.model_executor.execute_model = self._execute_and_abort

    def step(self, *, more: bool) -> bool:
        """One engine step and what happens around it; False when nothing is left to do."""
        while more and len(self._live) < self._dice.choice([1, 6, AT_ONCE_MAX]):
            self._submit()
        for output in self._engine.step():
            if output.finished:
                self._check(output)
        self._forget_gone()
        if self._live and self._dice.random() < 0.01:
            self._abort(self._dice.choice(list(self._live)))
        if self._dice.random() < 0.01:
            self.counts.resets += bool(self._llm.reset_prefix_cache())
        return more or bool(self._live)

    def reset_all(self) -> None:
        """Forget all that was stored, as after an update of the weights; nothing is running."""
        for _ in range(3):
            self._engine.step()
        self.counts.resets += bool(self._llm.reset_prefix_cache(reset_connector=True))

    def end(self) -> None:
        """Whoever comes next finds the engine as it was."""
        self._core.model_executor.execute_model = self._execute

    def _submit(self) -> None:
        from vllm import SamplingParams

        number = self._dice.randrange(len(self._prompts))
        asked = _Asked(number, self._dice.choice([1, 3, len(self._expected[number])]))
        params = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=asked.max_tokens
        )
        self._submitted += 1
        name = f"soak{self._submitted}"
        inputs: Any = {"prompt_token_ids": list(self._prompts[number])}
        self._engine.add_request(name, inputs, params)
        self._live[name] = asked

    def _check(self, output: Any) -> None:
        asked = self._live.pop(output.request_id, None)
        if asked is None:
            return
        self.counts.finished += 1
        self.counts.cached_tokens += output.num_cached_tokens or 0
        answer = list(output.outputs[0].token_ids)
        if answer != self._expected[asked.number][: asked.max_tokens]:
            self.counts.wrong.append(
                f"prompt {asked.number}, {asked.max_tokens} tokens, "
                f"{output.num_cached_tokens} cached, {output.outputs[0].finish_reason}: {answer}"
            )

    def _abort(self, name: str) -> None:
        self._engine.abort_request([name])
        del self._live[name]
        self.counts.aborted += 1

    def _execute_and_abort(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        # As a client that goes away while a step runs: vLLM carries it out when the step is over.
        states = self._engine.output_processor.request_states
        known = [name for name in self._core.scheduler.requests if name in states]
        if known and self._dice.random() < 0.02:
            name = self._dice.choice(known)
            self._core.aborts_queue.put_nowait([name])
            self._gone.append(states[name].external_req_id)
            self.counts.aborted_within_step += 1
        return self._execute(output, *args, **kwargs)

    def _forget_gone(self) -> None:
        """Nothing will be heard of them: tell the engine's front as well."""
        gone, self._gone = self._gone, []
        for name in gone:
            if name in self._live:
                self._abort(name)


def live(
    llm: Any, prompts: list[list[int]], expected: list[list[int]], requests: int, seed: int
) -> dict[str, Any]:
    """Live until so many requests are finished, twice, with a reset of everything in between.

    ``expected``: the greedy tokens of each prompt. Returns what was counted, and every answer that
    was not the expected one.
    """
    life = _Life(llm, prompts, expected, seed)
    for half in (1, 2):
        while life.step(more=life.counts.finished < half * requests // 2):
            pass
        life.reset_all()
    life.end()
    return vars(life.counts)


def spoil_reads(_llm: Any, seed: int) -> None:
    """From now on, payloads read from a folder by this process are now and then late, missing,
    refused or corrupt, and writing one fails."""
    from objkv.errors import StoreUnavailable
    from objkv.stores.base import Arrived, Buffer
    from objkv.stores.local import LocalStore

    dice, lock = random.Random(seed), threading.Lock()
    get_into, put_if_absent = LocalStore.get_into, LocalStore.put_if_absent

    def draw() -> tuple[int, float]:
        with lock:
            return dice.randrange(100), dice.random()

    def spoiled(
        get: Callable[[Arrived | None], int | None], buffer: memoryview, arrived: Arrived | None
    ) -> int | None:
        kind, share = draw()
        time.sleep(share * (0.5 if kind >= 100 - FAULTS_OF_100 else 0.02))
        if kind < FAULTS_OF_100:
            return None
        if kind < 2 * FAULTS_OF_100:
            raise StoreUnavailable("refused, as the test wants it")
        if kind >= 3 * FAULTS_OF_100:
            return get(arrived)
        told = [0]

        def flip_and_tell(nbytes: int) -> None:
            # Before anybody looks at them: bytes are used as soon as they are told of.
            at = int(share * len(buffer))
            if told[0] <= at < nbytes:
                buffer[at] ^= 1 << int(share * 8)
            told[0] = nbytes
            if arrived is not None:
                arrived(nbytes)

        return get(flip_and_tell)

    def spoiled_get(
        self: LocalStore,
        key: str,
        buffer: memoryview,
        arrived: Arrived | None = None,
        start: int | None = None,
    ) -> int | None:
        return spoiled(lambda told: get_into(self, key, buffer, told, start), buffer, arrived)

    def spoiled_put(self: LocalStore, key: str, value: Buffer) -> bool:
        kind, share = draw()
        time.sleep(share * 0.05)
        if kind < FAULTS_OF_100:
            raise StoreUnavailable("refused, as the test wants it")
        return put_if_absent(self, key, value)

    LocalStore.get_into = spoiled_get  # type: ignore[method-assign]
    LocalStore.put_if_absent = spoiled_put  # type: ignore[method-assign]


def leftovers(llm: Any) -> dict[str, int]:
    """What is still held when nothing is running: all of it should be none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    worker = get_kv_transfer_group()._worker
    side = scheduler.connector._scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(scheduler.requests),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "load slabs": _leased(worker._loader._slabs),
        "save slabs": _leased(worker._saver._slabs),
        "jobs": len(worker._loader._jobs),
        "marks": len(worker._saver._marks),
        "tracked": len(side._requests.ids()),
        "loading": len(side._loading),
        "held": len(side._held),
    }


def _leased(pool: Any) -> int:
    return int(pool.leased)
