"""Encoder outputs that one replica made are another's: never encoded again, never wrong.

Greedy tokens change with the image, so equal tokens show equal outputs.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engine import fleet
from tests.engine.fleet import NUMBERS_TOLD, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Result, call
from tests.engine.vision_model import encoder, job, see, zero_loads

pytestmark = pytest.mark.slow
ONE, OTHER, THIRD, BOTH = (1,), (2,), (3,), (1, 2)
SEEN = see(ONE, OTHER, BOTH, ONE)


def answer(run: Result, at: int = 0) -> dict[str, Any]:
    """What came of its ``at``-th ``see``."""
    found: list[dict[str, Any]] = [one for one in run.answers if one is not None]
    return found[at]


def counts(run: Result, *names: str) -> list[float]:
    return [run.metrics.get(f"vllm:objkv_encoder_{name}", 0) for name in names]


def test_the_second_replica_encodes_nothing_and_generates_the_same(folder: Path) -> None:
    store = SharedStore(folder / "store")
    alone = run_replica(job(SEEN), folder)
    first, second = (
        run_replica(job(SEEN, NUMBERS_TOLD, transfer=encoder(store)), folder) for _ in range(2)
    )
    tokens = answer(alone)["tokens"]
    one, other, both, again = tokens
    assert one == again
    assert len({tuple(one), tuple(other), tuple(both)}) == 3
    zeros = run_replica(job(call(zero_loads), SEEN, transfer=encoder(store)), folder)
    assert answer(zeros)["tokens"][0] != one, "the tokens show which image was seen"

    assert [answer(run)["encoded"] for run in (alone, first, second)] == [2, 2, 0]
    assert answer(first)["tokens"] == answer(second)["tokens"] == tokens
    assert set(answer(second)["finished"]) == {"length"}
    assert counts(first, "saves_accepted", "hits") == [2, 0]
    assert counts(second, "saves_accepted", "hits", "loads") == [0, 2, 2]
    assert len(list(store.bulk.glob("*/identity.json"))) == 1

    # Scheduler and two workers in processes of their own: one image is loaded, one is saved.
    ranks = SharedStore(folder / "ranks")
    run_replica(job(see(ONE), transfer=encoder(ranks)), folder)
    two = {"processes": True, "engine": {"tensor_parallel_size": 2}}
    run = run_replica(job(SEEN, NUMBERS_TOLD, transfer=encoder(ranks), **two), folder)
    assert answer(run)["tokens"] == tokens
    assert counts(run, "hits") == [1]
    assert len(ranks.payloads()) == 2, "saved once, by one of the ranks"


def test_beside_the_kv_connector_both_hit_and_an_image_that_the_kv_covers_is_not_loaded(
    folder: Path,
) -> None:
    """Both connectors on one store. Chunks of 32 tokens: one ends before the image, or after it."""
    store = SharedStore(folder / "store")
    kv = store.job(chunk_tokens=fleet.BLOCK).connector
    before, within = see(ONE, OTHER, head=40), see(ONE, OTHER, head=12, tail=60)
    asked = see(ONE, OTHER, THIRD, head=12, tail=60)

    def run(*steps: Any) -> Result:
        return run_replica(job(*steps, NUMBERS_TOLD, transfer=encoder(store), kv=kv), folder)

    alone = run_replica(job(before, within, asked), folder)
    first, second = (run(before, within) for _ in range(2))
    for at in (0, 1):
        tokens = [answer(one, at)["tokens"] for one in (alone, first, second)]
        assert tokens == [tokens[0]] * 3
        assert answer(second, at)["encoded"] == 0
    assert answer(second)["cached"] == [32, 32]
    assert counts(second, "hits") == [2]

    covered = run(asked)
    assert answer(covered)["cached"] == [64, 64, 0]
    assert answer(covered)["encoded"] == 1
    assert counts(covered, "loads") == [0]
    assert answer(covered)["tokens"] == answer(alone, 2)["tokens"]
