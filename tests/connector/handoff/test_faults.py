"""Whatever is wrong with a hand-off, the engine computes: no wrong byte, no exception, no hang."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from objkv.assembly import agent
from objkv.assembly.backends import Backends, open_backends
from objkv.cache.chunks import shard_record
from objkv.codec.payload import read_header
from objkv.config import load_config
from objkv.connector import handoff
from objkv.connector.handoff import RankAgreement
from objkv.index.base import ChunkEntry
from objkv.telemetry import NullRecorder
from tests.connector.handoff.world import PROMPTS, SPOILT, Engine, bits, model_folder, prompts, step
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore

WAITS_S = 120.0
"""For another thread that has nothing else to do."""


def lengths(engine: Engine) -> dict[int, Path]:
    """The payloads by the number of their prompt's tokens."""
    return {read_header(p.read_bytes()).claim.token_end: p for p in engine.payloads()}


def test_a_broken_byte_anywhere_is_a_miss_and_is_forgotten(folder: Path) -> None:
    sender = Engine(folder)
    sender.send(step())
    path = lengths(sender)[7]
    whole = path.read_bytes()
    header = read_header(whole)
    stores = {"bulk_url": f"file://{folder}/chunks", "index_url": f"sqlite://{folder}/index.sqlite"}
    backends = open_backends(load_config(stores, environ={}), NullRecorder())
    index = backends.index
    claim = header.claim
    chunk = ChunkEntry(claim.key.namespace, claim.key.prefix_hash, claim.parent_hash, 0, 7)

    @settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 8 * len(whole) - 1))
    def check(bit: int) -> None:
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        index.publish(chunk, {claim.key.field: shard_record(header)}, ttl_s=60)
        receiver = Engine(folder)  # its node has not looked for it yet
        receiver.spoil()
        assert receiver.receive(step()) == (None, False)
        assert all(bool((bits(cache) == SPOILT).all()) for cache in receiver.caches)
        assert receiver.agent.recorder.value("load_corrupt") == 1
        receiver.close()
        assert index.find(chunk.namespace, [chunk.prefix_hash], [claim.key.field]) == [None]

    with backends:
        check()


def test_a_store_that_takes_nothing_is_not_waited_for_in_every_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky = FlakyStore(MemoryStore())
    backends = Backends(flaky, None, MemoryIndex())
    monkeypatch.setattr(agent, "open_backends", lambda *_, **__: backends)
    monkeypatch.setattr(handoff, "_STORED_S", 0.1)
    looks: list[float] = []
    monkeypatch.setattr(handoff, "sleep", looks.append)
    engine = Engine(folder)
    flaky.hold(gate := threading.Event())
    engine.send(step())
    assert looks
    looks.clear()
    engine.send(prompts([[1, 2]], [[1]]))
    assert not looks
    assert engine.receive(step())[1]  # its own node has it
    assert Engine(folder).receive(step()) == (None, False)
    gate.set()


@pytest.mark.parametrize("fault", ["no agent", "closed twice", "a bug"])
def test_without_what_it_needs_all_is_a_miss_and_a_drop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine = Engine(folder)
    engine.send(step())
    if fault == "no agent":
        engine.lose_agent()
    elif fault == "a bug":
        monkeypatch.setattr(handoff, "read_prompts", lambda *_: 1 / 0)
    else:
        engine.connector.close()
        engine.connector.close()
    assert engine.receive(step()) == (None, False)
    engine.send(prompts([[1, 2]], [[1]]))
    assert len(engine.payloads()) == len(PROMPTS)


def test_an_agent_that_hangs_is_left_at_the_deadline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = Engine(folder, settings={"save_deadline_ms": 200}), threading.Event()
    commit = engine.agent.node.saves.commit

    def hang(*args: Any, **more: Any) -> Any:
        gate.wait(WAITS_S)
        return commit(*args, **more)

    monkeypatch.setattr(engine.agent.node.saves, "commit", hang)
    engine.send(step())
    assert not engine.payloads()
    gate.set()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: setattr(s, "lora_requests", {"an adapter"}),
        lambda s: setattr(s, "multi_modal_kwargs", {"pixel_values": 1}),
        lambda s: setattr(s, "inputs_embeds", torch.zeros(20, 4)),
        lambda s: setattr(s.attn_metadata, "encoder_seq_lens", [4]),
        lambda s: setattr(s, "attn_metadata", None),
        lambda s: setattr(s, "input_tokens", None),
        lambda s: setattr(s.attn_metadata, "seq_lens", None),
        lambda s: setattr(s.attn_metadata, "seq_lens", [20]),
        lambda s: setattr(s.attn_metadata, "seq_lens", [15, 13]),  # 8 tokens computed before
        lambda s: setattr(s.attn_metadata, "seq_lens", [20, 13]),  # as many as the batch has
        lambda s: setattr(s.attn_metadata, "seq_lens", [20, 0]),
        lambda s: setattr(s.attn_metadata, "num_prefill_tokens", 0),
        lambda s: setattr(s.attn_metadata, "num_prefill_tokens", 21),
        lambda s: setattr(s, "input_tokens", s.input_tokens[:-1]),
        lambda s: s.attn_metadata.slot_mapping.__setitem__(3, -1),
        lambda s: s.attn_metadata.slot_mapping.__setitem__(3, 64 * 4),
        lambda s: s.input_tokens.__setitem__(3, -1),
        lambda s: setattr(s.attn_metadata, "slot_mapping", s.attn_metadata.slot_mapping[:-1]),
    ],
)
def test_prompts_that_token_ids_do_not_name_whole_are_left_alone(
    folder: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[SimpleNamespace], None]
) -> None:
    engine = Engine(folder)
    odd = step()
    spoil(odd)
    engine.send(odd, engine.states(20))
    assert [*lengths(engine)] in ([], [13])  # where only one prompt is odd
    Engine(folder).send(step())
    engine.spoil()
    assert engine.receive(odd) == (None, False)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]  # no index error, no assertion


def test_requests_that_generate_are_neither_sent_nor_left_out(folder: Path) -> None:
    engine = Engine(folder)
    mixed = step()
    mixed.input_tokens = torch.cat((mixed.input_tokens, torch.tensor([5])))
    attention = mixed.attn_metadata
    attention.slot_mapping = torch.cat((attention.slot_mapping, torch.tensor([77])))
    attention.seq_lens = [*attention.seq_lens, 30]
    engine.send(mixed)
    assert len(engine.payloads()) == len(PROMPTS)
    assert engine.receive(mixed) == (None, False)
    assert engine.receive(step())[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.caches.pop(),
        lambda e: e.caches.append(e.caches[0]),
        lambda e: e.caches.__setitem__(1, e.caches[1][..., :4]),
        lambda e: e.caches.__setitem__(1, e.caches[1].flatten(2)),
        lambda e: e.caches.__setitem__(1, e.caches[1].double()),
        lambda e: e.caches.__setitem__(1, e.caches[1][:, :0]),
        lambda e: setattr(e.model.model, "end_layer", 4),
        lambda e: setattr(e.model.model, "start_layer", -1),
    ],
)
def test_caches_that_objkv_does_not_know_are_left_alone(
    folder: Path, change: Callable[[Engine], None]
) -> None:
    sender, odd = Engine(folder), Engine(folder)
    sender.send(step())
    change(odd)
    before = [bits(c).clone() for c in odd.caches if c.element_size() < 8]
    assert odd.receive(step()) == (None, False)
    odd.send(prompts([[1, 2]], [[1]]))
    assert len(sender.payloads()) == 2
    after = [bits(c) for c in odd.caches if c.element_size() < 8]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_prompt_beyond_the_memory_allowed_is_not_sent(folder: Path) -> None:
    small = {"pinned_bytes_max": 1 << 20}
    long = prompts([list(range(90)) * 15, [1, 2]], [list(range(350)), [399]])
    Engine(folder, blocks=400).send(long)
    bounded = Engine(folder, blocks=400, settings=small)
    assert bounded.receive(long)[1]
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    model_folder(elsewhere)
    bounded = Engine(elsewhere, blocks=400, settings=small)
    bounded.send(long)
    assert [*lengths(bounded)] == [2]


def test_a_rank_that_lost_the_others_asks_them_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def lost(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise RuntimeError("timed out")

    monkeypatch.setattr(dist, "all_reduce", lost)
    nobody: Any = None
    agree = RankAgreement(nobody)
    assert not agree(True)
    assert not agree(True)
    assert calls == [1]


@pytest.mark.parametrize(
    "states",
    [
        torch.zeros(20, 23),
        torch.zeros(19, 24),
        torch.zeros(20, 24, dtype=torch.float16),
        torch.zeros(20, 2, 12),
        SimpleNamespace(tensors={"hidden_states": torch.zeros(20, 24)}),
    ],
)
def test_states_of_another_form_are_not_sent(folder: Path, states: Any) -> None:
    engine = Engine(folder)
    engine.send(prompts([[*range(20)]], [[1, 2, 3, 4, 5]]), states)
    assert not engine.payloads()
