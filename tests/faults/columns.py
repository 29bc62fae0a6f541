"""The other ways to an engine: vLLM's own offloading above a tier, V0's hand-off, the encoder.

Each is vLLM's own code as far as the worlds of ``tests/connector`` have it, over real stores.
"""

from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import LookupResult

from tests.connector.encoder.engine import make_model
from tests.connector.encoder.test_connector import ROWS, WIDTH
from tests.connector.encoder.test_connector import Engine as SeeingEngine
from tests.connector.handoff import world as handoff
from tests.connector.tier import world as tier

SAVED_S = 60.0


class Tier:
    """objkv's tier below vLLM's CPU memory, which keeps nothing here that was not just asked."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        tier.init_hashes()
        self._engine = tier.Engine(folder, settings, rows=2)

    def save(self, number: int) -> None:
        request = self._engine.begin()
        self._engine.compute(request, {tier.offload_key(number): tier.row(number)})
        self._engine.settle()
        self._engine.agent.node.saves.drain(SAVED_S)
        self._engine.end(request)

    def ask(self, number: int) -> bool:
        request, key = self._engine.begin(), tier.offload_key(number)
        (found,) = self._engine.find(request, [key])
        if found is LookupResult.HIT:
            assert self._engine.read(request, key) == tier.row(number)
        self._engine.settle()
        self._engine.end(request)
        return found is LookupResult.HIT

    def close(self) -> None:
        self._engine.close()


class Handoff:
    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        if not (folder / "model").exists():
            handoff.model_folder(folder)
        self._engine = handoff.Engine(folder, settings=settings)
        self._kv = [handoff.bits(cache).clone() for cache in self._engine.caches]

    def _step(self, number: int) -> Any:
        return handoff.prompts([[number % 90, *range(6)]], [[3, 1]])

    def save(self, number: int) -> None:
        for cache, kv in zip(self._engine.caches, self._kv, strict=True):
            handoff.bits(cache).copy_(kv)
        self._engine.send(self._step(number))
        self._engine.agent.node.saves.drain(SAVED_S)

    def ask(self, number: int) -> bool:
        step = self._step(number)
        slots = step.attn_metadata.slot_mapping
        for cache, kv in zip(self._engine.caches, self._kv, strict=True):
            handoff.bits(cache).copy_(kv)
        expected = self._engine.kv(slots)
        self._engine.spoil()
        states, loaded = self._engine.receive(step)
        if loaded:
            assert handoff.same(self._engine.kv(slots), expected)
            assert torch.equal(
                handoff.bits(states), handoff.bits(self._engine.states(len(step.input_tokens)))
            )
        else:
            assert all(bool((kv == handoff.SPOILT).all()) for kv in self._engine.kv(slots))
        return loaded

    def close(self) -> None:
        self._engine.close()


class Encoder:
    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        model = folder / "vision"
        if not model.exists():
            model.mkdir()
            make_model(model)
        self._engine = SeeingEngine(model, folder, "ec_both", settings)

    def _see(self, number: int) -> bool:
        output = torch.full((ROWS, WIDTH), number % 128, dtype=torch.bfloat16)
        encoded = self._engine.see(f"image-{number}", output)
        assert torch.equal(self._engine.cache[f"image-{number}"], output)
        assert self._engine.worker.worker.writer.drain(SAVED_S)
        self._engine.agent.node.saves.drain(SAVED_S)
        return encoded

    def save(self, number: int) -> None:
        self._see(number)

    def ask(self, number: int) -> bool:
        return not self._see(number)

    def close(self) -> None:
        self._engine.shutdown()


Column = Tier | Handoff | Encoder
"""A replica that saves things by number, and is asked for them: whether it was loaded, which the
replica never did before. Asserts that it is right."""
COLUMNS = {"tier": Tier, "handoff": Handoff, "encoder": Encoder}
