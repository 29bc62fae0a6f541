"""What goes in comes out, bit by bit, in every shape that V0 had; and only what was handed over."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from objkv.codec.payload import CODECS
from objkv.config import load_config
from objkv.connector.handoff import Agreement, read_handoff_identity
from objkv.errors import ConfigError
from tests.connector.handoff.world import (
    BLOCK,
    LAYERS,
    PROMPTS,
    Engine,
    Shape,
    bits,
    engine_config,
    model_folder,
    prompts,
    same,
    slots_of,
    step,
)

SHAPES = {
    "float32": (Shape(), None),
    "bfloat16": (Shape(dtype=torch.bfloat16), None),
    "fp8": (Shape(dtype=torch.bfloat16), torch.uint8),
    "float16-mla": (Shape(dtype=torch.float16, latent=True), None),
}


def tensors(states: Any) -> list[torch.Tensor]:
    parts = [states] if isinstance(states, torch.Tensor) else states.tensors.values()
    return list(map(bits, parts))


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("name", SHAPES)
def test_every_bit_comes_out_in_other_slots(folder: Path, name: str, codec: str) -> None:
    shape, cache_dtype = SHAPES[name]
    sender = Engine(folder, shape, cache_dtype=cache_dtype, settings={"codec": codec})
    here, there = step(), step(elsewhere=True)
    sent = sender.send(here)
    receiver = Engine(folder, shape, cache_dtype=cache_dtype)
    receiver.spoil()
    untouched = [bits(cache).clone() for cache in receiver.caches]
    states, bypass = receiver.receive(there)
    assert bypass
    assert same(tensors(states), tensors(sent))
    wanted = sender.kv(here.attn_metadata.slot_mapping)
    slots = there.attn_metadata.slot_mapping
    assert same(receiver.kv(slots), wanted)
    block, offset = slots // BLOCK, slots % BLOCK
    for cache, before in zip(receiver.caches, untouched, strict=True):
        for part, old in [(cache, before)] if shape.latent else zip(cache, before, strict=True):
            bits(part)[block, offset] = old[block, offset]
    assert same([bits(cache) for cache in receiver.caches], untouched)


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "mla"])
def test_each_rank_of_two_by_two_gets_its_own(folder: Path, *, latent: bool) -> None:
    def engines() -> list[Engine]:
        shapes = [
            Shape(tp, 2, start, end, latent=latent)
            for start, end in ((0, 1), (1, LAYERS))
            for tp in (0, 1)
        ]
        return [Engine(folder, shape, rank) for rank, shape in enumerate(shapes)]

    senders, receivers = engines(), engines()
    if latent:  # of which tensor-parallel ranks have the same
        for one, other in (senders[:2], senders[2:]):
            other.caches = one.caches
    sent = [engine.send(step()) for engine in senders]
    assert len(senders[0].payloads()) == len(PROMPTS) * (2 if latent else 4)
    slots = step(elsewhere=True).attn_metadata.slot_mapping
    for sender, receiver, given_on in zip(senders, receivers, sent, strict=True):
        receiver.spoil()
        states, bypass = receiver.receive(step(elsewhere=True))
        assert bypass
        assert type(states) is type(given_on)
        assert same(tensors(states), tensors(given_on))
        assert same(receiver.kv(slots), sender.kv(step().attn_metadata.slot_mapping))


@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_all_something_or_nothing_in_any_batch(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The answer is yes exactly if every prompt of a batch was sent; then it is what was sent."""
    folder = tmp_path_factory.mktemp("world")
    model_folder(folder)
    sender, receiver = Engine(folder), Engine(folder)
    known = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), max_size=4))
    fresh = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), max_size=2))
    sent = {}
    tables = [[5 * i + j for j in range(3)] for i in range(12)]
    if known:
        batch = prompts(known, tables[: len(known)])
        states = sender.send(batch)
        start = 0
        for tokens, table in zip(known, tables, strict=False):
            end = start + len(tokens)
            # Of prompts with equal tokens the first is kept, as their KV would be equal.
            slots = torch.tensor(slots_of(table, len(tokens)))
            sent.setdefault(tuple(tokens), (bits(states[start:end]), sender.kv(slots)))
            start = end
    asked = data.draw(st.permutations([*known, *fresh]))[:5]
    if not asked:
        return
    batch = prompts(asked, tables[: len(asked)])
    receiver.spoil()
    states, bypass = receiver.receive(batch)
    assert bypass == all(tuple(tokens) in sent for tokens in asked)
    if bypass:
        assert torch.equal(bits(states), torch.cat([sent[tuple(t)][0] for t in asked]))
        for tokens, table in zip(asked, tables, strict=False):
            found = receiver.kv(torch.tensor(slots_of(table, len(tokens))))
            assert same(found, sent[tuple(tokens)][1])


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.model_config, "values", {"rope_theta": 5e5}),
        lambda c: setattr(c.model_config, "quantization", "fp8"),
        lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e5m2"),
        lambda c: c.kv_transfer_config.kv_connector_extra_config.update(tenant="other"),
        lambda c: c.kv_transfer_config.kv_connector_extra_config.update(weights_epoch=1),
        lambda c: c.kv_transfer_config.kv_connector_extra_config.update(model_id="other"),
        lambda c: model_folder(Path(c.model_config.model).parent, weights=9.0),
    ],
)
def test_another_identity_has_another_namespace(folder: Path, change: Any) -> None:
    def namespace(config: Any) -> str:
        settings = load_config(config.kv_transfer_config.kv_connector_extra_config, environ={})
        return read_handoff_identity(config, settings).namespace()

    config = engine_config(folder)
    before = namespace(config)
    assert before == namespace(engine_config(folder, tp_size=2))
    change(config)
    assert namespace(config) != before


def test_several_ranks_need_a_way_to_agree(folder: Path) -> None:
    nobody: Any = None
    with pytest.raises(ConfigError, match=r"torch\.distributed"):
        Engine(folder, Shape(0, 2), agree=nobody)


@pytest.mark.parametrize("answer", [True, False])
def test_ranks_are_asked_once_whatever_happens(folder: Path, *, answer: bool) -> None:
    asked: list[bool] = []

    def ask(mine: bool) -> bool:
        asked.append(mine)
        return mine and answer

    agree: Agreement = ask
    engine = Engine(folder, agree=agree)
    assert engine.receive(step()) == (None, False)
    engine.send(step())
    assert engine.receive(step())[1] == answer
    engine.send(step(lora_requests={"a"}))
    engine.receive(step(lora_requests={"a"}))
    engine.connector.close()
    engine.send(step())
    engine.receive(step())
    assert len(asked) == 7
    assert asked[::2] == [False, True, False, False]  # of receives; that of a send only waits
