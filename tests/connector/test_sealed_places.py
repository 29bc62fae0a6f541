"""Sealed payloads that are no chunks: encoder outputs, hand-offs, rows of the offloading tier."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult

from tests.codec.seals import SEALS, other_seal
from tests.connector.encoder.world import Limits, Place, output_of, replica, request
from tests.connector.handoff import world as handoff_world
from tests.connector.handoff.model import model_folder
from tests.connector.tier import world as tiering

KINDS = sorted(SEALS)
OURS, THEIRS = (Random(seed).randbytes(32).hex() for seed in (1, 2))


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("kind", KINDS)
def test_encoder_outputs_are_shared_by_who_holds_the_keys(kind: str, codec: str) -> None:
    place, limits = Place(), Limits(codec=codec)
    with replica(place, limits=limits, seal=SEALS[kind]) as first:
        assert first.see(request("a", "x")) == ["x"]
    with replica(place, seal=SEALS[kind]) as second:
        assert second.see(request("b", "x")) == []
        assert torch.equal(second.cache["x"], output_of("x"))
    with replica(place, seal=other_seal(kind)) as stranger:
        assert stranger.see(request("c", "x")) == ["x"]
        assert stranger.count("load_corrupt") == 1


def settings(folder: Path, secret: str) -> dict[str, Any]:
    file = folder / f"keys-{secret[:4]}"
    file.write_text(f"k * {secret}\n")
    file.chmod(0o600)
    return {"signing_keys_file": str(file), "encryption_keys_file": str(file)}


def encrypted(folder: Path) -> list[bool]:
    """Of every payload that is stored, whether it is."""
    paths = sorted((folder / "chunks").rglob("*.safetensors"))
    return [b"+aes256gcm" in path.read_bytes() for path in paths]


def test_hand_offs_are_taken_over_by_who_holds_the_keys(tmp_path: Path) -> None:
    model_folder(tmp_path)
    sender, receiver, stranger = (
        handoff_world.Engine(tmp_path, settings=settings(tmp_path, secret))
        for secret in (OURS, OURS, THEIRS)
    )
    plain = handoff_world.Engine(tmp_path)
    sent = sender.send(handoff_world.step())
    assert set(encrypted(tmp_path)) == {True}
    there = handoff_world.step(elsewhere=True)
    states, is_whole = receiver.receive(there)
    assert is_whole
    assert torch.equal(handoff_world.bits(states), handoff_world.bits(sent))
    for other in (stranger, plain):
        assert other.receive(there) == (None, False)
    assert stranger.agent.recorder.value("load_corrupt") >= 1


def test_rows_of_the_tier_are_found_by_who_holds_the_keys(tmp_path: Path) -> None:
    tiering.init_hashes()
    writer, reader, stranger = (
        tiering.Engine(tmp_path, settings(tmp_path, secret)) for secret in (OURS, OURS, THEIRS)
    )
    writer.save(1)
    assert encrypted(tmp_path) == [True]
    asked, key = reader.begin(), tiering.offload_key(1)
    assert reader.find(asked, [key]) == [LookupResult.HIT]
    assert reader.read(asked, key) == tiering.row(1)
    assert stranger.ask(1) == [LookupResult.MISS]
    for engine in (writer, reader, stranger):
        engine.close()
