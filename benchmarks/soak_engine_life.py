"""The random life of one real engine: an operator's month in minutes.

Requests with shared prefixes arrive in bursts and are aborted, also within a step. Blocks run out,
so that some are preempted. The engine drops its own cache, updates its weights, sleeps and wakes
up. Every answer is compared with that of an engine without a connector.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

AT_ONCE_MAX = 12
LATE_S = 120.0
"""A request that takes longer hangs: its deadlines lie far below."""
WRONG_TOLD_MAX = 20


_WITHOUT_LOADS = {"RUNNING", "WAITING", "PREEMPTED"}


@dataclass
class _Asked:
    number: int
    max_tokens: int
    since_s: float = field(default_factory=time.monotonic)


class Life:
    """Belongs to the thread that steps the engine."""

    def __init__(
        self, llm: Any, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
    ) -> None:
        """``expected``: the greedy answers to ``prompts``, as long as any request may ask for."""
        self._llm = llm
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._prompts, self._expected = prompts, expected
        self._live: dict[str, _Asked] = {}
        self._gone: list[str] = []
        self._submitted = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        """What must never be; empty, or the soak has failed."""
        self._execute = self._core.model_executor.execute_model
        self._core.model_executor.execute_model = self._execute_and_abort
        self._dice = random.Random()

    def seed(self, seed: int) -> None:
        """What comes depends on it, as far as time allows."""
        self._dice = random.Random(seed)

    def step(self, *, more: bool, disturb: bool) -> bool:
        """One step and what happens around it; False when nothing is left to do.

        ``disturb``: whether requests are aborted, and the engine sleeps and updates its weights.
        """
        dice = self._dice
        while more and len(self._live) < dice.choice([1, 6, AT_ONCE_MAX]):
            self._submit()
        for output in self._engine.step():
            if output.finished:
                self._check(output)
        self.counts["steps"] += 1
        self._forget_gone()
        self._look_for_late()
        if dice.random() < 0.004:
            # Whoever runs is preempted for it, unless a load is under way: vLLM cannot do that.
            scheduler = self._core.scheduler
            states = {one.status.name for one in scheduler.requests.values()}
            preempts = disturb and states <= _WITHOUT_LOADS and not _loads(scheduler)
            done = self._llm.reset_prefix_cache(reset_running_requests=preempts)
            self.counts["prefix cache resets"] += bool(done)
        if disturb:
            if self._live and dice.random() < 0.01:
                self._abort(dice.choice(list(self._live)))
                self.counts["aborts"] += 1
            if (luck := dice.random()) < 0.0006:
                self._sleep()
            elif luck < 0.0012:
                self._update_weights()
        self._disturbed = disturb
        return more or bool(self._live)

    _disturbed = False

    def end(self) -> None:
        """Until no finished request is held back; then the engine is as it was."""
        deadline = time.monotonic() + LATE_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > deadline:
                self._say_wrong("hangs", "requests are still held at the end")
                break
            self._engine.step()
        self._core.model_executor.execute_model = self._execute

    def _submit(self) -> None:
        from vllm import SamplingParams

        number = self._dice.randrange(len(self._prompts))
        longest = len(self._expected[number])
        asked = _Asked(number, self._dice.choice([1, 3, longest // 3, longest]))
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
        self.counts["answers"] += 1
        self.counts["cached tokens"] += output.num_cached_tokens or 0
        answer = list(output.outputs[0].token_ids)
        if answer != list(self._expected[asked.number][: asked.max_tokens]):
            self._say_wrong(
                "wrong answers",
                f"prompt {asked.number}, {asked.max_tokens} tokens, {output.num_cached_tokens} "
                f"cached, {output.outputs[0].finish_reason}: {answer}",
            )

    def _look_for_late(self) -> None:
        now = time.monotonic()
        for name, asked in list(self._live.items()):
            if now - asked.since_s > LATE_S:
                self._say_wrong("hangs", f"prompt {asked.number}: no answer in {LATE_S:.0f} s")
                self._abort(name)

    def _say_wrong(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if len(self.wrong) < WRONG_TOLD_MAX:
            self.wrong.append(f"{kind}: {what}")

    def _abort(self, name: str) -> None:
        self._engine.abort_request([name])
        del self._live[name]

    def _execute_and_abort(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        # As a client that goes away while a step runs: vLLM carries it out when the step is over.
        states = self._engine.output_processor.request_states
        known = [name for name in self._core.scheduler.requests if name in states]
        if self._disturbed and known and self._dice.random() < 0.01:
            name = self._dice.choice(known)
            self._core.aborts_queue.put_nowait([name])
            self._gone.append(states[name].external_req_id)
            self.counts["aborts within a step"] += 1
        return self._execute(output, *args, **kwargs)

    def _forget_gone(self) -> None:
        """Nothing will be heard of them: tell the engine's front as well."""
        gone, self._gone = self._gone, []
        for name in gone:
            if name in self._live:
                self._abort(name)

    def _sleep(self) -> None:
        """As vLLM sleeps on a GPU: requests are aborted, the paged cache loses its memory, and all
        that it held. Saves may be under way."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for name in list(self._live):
            self._abort(name)
        deadline = time.monotonic() + LATE_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > deadline:
                self._say_wrong("hangs", "aborted requests that do not end")
                return
            self._engine.step()
        connector = get_kv_transfer_group()
        connector.unregister_kv_caches()
        for cache in connector._kv_caches.values():
            cache.fill_(7)  # whoever still reads it takes rubbish out
        if not self._llm.reset_prefix_cache():
            self._say_wrong("exceptions", "blocks are in use with no request there")
        connector.restore_kv_caches()
        self.counts["sleeps"] += 1

    def _update_weights(self) -> None:
        """In place, in the middle of everything, to the same values: answers stay what they are."""
        self._llm.collective_rpc("reload_weights")
        self.counts["weight updates"] += 1


def _loads(scheduler: Any) -> bool:
    """Whether any block waits for bytes."""
    side = scheduler.connector._scheduler
    return bool(side._loading or side._loads or side._held)
