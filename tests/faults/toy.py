"""An engine as ``hybrid_engine`` has it, whose loads may fail within the step as well.

Attention waits for each layer before it reads it, and what it computes from blocks that then turn
out to have failed is thrown away by the scheduler: only what is kept has to be right.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from objkv.keys.identity import GroupIdentity
from tests.connector.kv.hybrid_engine import Answer, Engine, digest, said
from tests.connector.kv.hybrid_layout import Layout

LAYOUT = Layout((("full", 0),), (4,), chunk_tokens=8)
LARGE = replace(LAYOUT, head_size=2048)
"""Payloads of 260 KiB, which fetching processes get."""
CHUNKS = 3
TAIL = 3
"""Tokens of a prompt after its last chunk."""
STORED_TOKENS = CHUNKS * LAYOUT.chunk_tokens
PAYLOAD_BYTES = 2 * 4096
"""Memory that a payload takes in an arena."""
ANSWER_TOKENS = 1


def prompt(seed: int) -> list[int]:
    """Tokens of three chunks and a bit; no two seeds share a chunk."""
    return [5 + digest([seed, i])[0] % 50 for i in range(STORED_TOKENS + TAIL)]


def expected(tokens: list[int]) -> list[int]:
    return said(tokens, ANSWER_TOKENS)


class ShakenEngine(Engine):
    """One replica; ``at_load`` is called once, before the next load begins."""

    def __init__(self, folder: Path, *, layout: Layout = LAYOUT, **settings: Any) -> None:
        self.at_load: Callable[[], None] | None = None
        self.sync_loads: list[bool] = []
        """Of each load that was planned, whether it was within the step."""
        self._wrong: dict[str, AssertionError] = {}
        self._lengths: dict[str, int] = {}
        super().__init__(layout, folder, **settings)
        for side in (self.worker, self.scheduler.connector):
            side.get_kv_connector_stats = lambda: None  # the test reads the recorders itself

    def answer(self, tokens: list[int], *, fetches: bool = True) -> Answer:
        """The answer to one prompt. ``fetches``: the memory of its own agent is emptied before."""
        if self.agent is not None and fetches:
            self.agent.forget()
        return self.run([tokens], max_tokens=ANSWER_TOKENS)[0]

    def is_idle(self) -> bool:
        """Whether nothing is being looked up, marked as used, or read in the background."""
        is_reading = self.worker.worker.loader.link.leased > 0
        is_fetching = self.agent is not None and self.agent.core.arena_cache.leased() > 0
        is_looking = self.scheduler.connector.scheduler.lookups.in_flight
        return not (is_looking or is_reading or is_fetching)

    def kept(self) -> int:
        """Payloads that its own agent has, and no store."""
        return 0 if self.agent is None else len(self.agent.core.arena_cache.held_back)

    def can_save(self) -> bool:
        """Whether its own agent does not pause saves because a store refused one."""
        return self.agent is None or not self.agent.node.saves.is_shedding

    def counted(self) -> Counter[str]:
        """What was counted since the last call, by its own agent as ``agent_<name>``."""
        found: Counter[str] = Counter()
        for side in (self.worker, self.scheduler.connector):
            found.update(side.recorder.drain())
        if self.agent is not None:
            for name, value in self.agent.recorder.drain().items():
                found[f"agent_{name.removeprefix('agent_')}"] += value
        return found

    def is_attached(self) -> bool:
        agent = self.worker.worker.loader.link.agent
        return agent is not None and not agent.has_ended()

    def _execute(self, output: Any) -> Any:
        loads = output.kv_connector_metadata.loads
        self.sync_loads += (plan.sync for plan in loads)
        if loads and self.at_load is not None:
            call, self.at_load = self.at_load, None
            call()
        result = super()._execute(output)
        failed = result.kv_connector_output.invalid_block_ids
        wrong, self._wrong = self._wrong, {}
        for name, error in wrong.items():
            if not failed.intersection(*[self._running[name].blocks[0]]):
                raise error
        return result

    def _update_states(self, output: Any) -> None:
        super()._update_states(output)
        for new in output.scheduled_new_reqs:
            self._lengths[new.req_id] = len(new.prompt_token_ids)
        # Source: vLLM 0.32, ``_update_states`` in ``v1/worker/gpu_model_runner.py``: tokens that
        # were sampled from failed loads are taken back.
        cached = output.scheduled_cached_reqs
        for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            del self._running[name].tokens[self._lengths[name] + count :]

    def _forward(self, output: Any) -> dict[str, list[int]]:
        for layer in self.caches[0]:
            self.worker.wait_for_layer_load(layer)
        return super()._forward(output)

    def _look(self, name: str, *, rings: bool) -> None:
        try:
            super()._look(name, rings=rings)
        except AssertionError as exc:
            self._wrong[name] = exc


class RevisedEngine(ShakenEngine):
    """A replica of one revision of the model: its weights are files of its own, by which objkv
    tells it from others, and so is the KV that it computes."""

    def __init__(self, revision: int, folder: Path, **settings: Any) -> None:
        self._revision = revision
        super().__init__(folder, **settings)

    def _configured(self, folder: Path, settings: dict[str, Any]) -> Any:
        config = super()._configured(folder, settings)
        model = folder / f"revision-{self._revision}"
        model.mkdir()
        save_file({"weight": torch.full((8,), float(self._revision))}, model / "model.safetensors")
        config.model_config = copy.copy(config.model_config)
        config.load_config = copy.copy(config.load_config)
        (model / "config.json").write_text(
            (Path(config.model_config.model) / "config.json").read_text()
        )
        config.model_config.model, config.load_config.load_format = str(model), "auto"
        return config

    def _content(self, group: GroupIdentity, tokens: Sequence[int], token: int) -> torch.Tensor:
        return super()._content(group, tokens, token) + self._revision / 4
