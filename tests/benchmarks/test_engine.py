"""``benchmarks.engine`` with fake engines: what is compared, and what is no result."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine as module
from benchmarks.engine_child import Order, Ready, Took
from objkv.errors import ObjkvError
from tests.benchmarks.setting import quick

SECONDS = {"none": 1.0, "objkv": 1.25, "objkv-loads": 0.1, "example": 0.3, "example-loads": 0.2}


class FakeEngine:
    def __init__(self, name: str, spoiled: dict[str, Any]) -> None:
        self.name, self.spoiled = name, spoiled
        self.ready = Ready(engine="vLLM 0", device="nothing")

    def do(self, order: Order) -> Took:
        seconds, served = SECONDS[self.name], order.prompts == 1 and self.name != "none"
        took = Took(
            seconds=seconds,
            first_token_s=seconds,
            answer=((1, 2),),
            served_tokens=512 * served,
        )
        spoils = self.name == "objkv-loads" and order.prompts == 1
        return took.model_copy(update=self.spoiled if spoils else {})


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the loading engine answers differently."""
    changes: dict[str, Any] = {}

    @contextmanager
    def running(_setting: Any, _scale: Any, _places: Any, name: str) -> Iterator[FakeEngine]:
        yield FakeEngine(name, changes)

    monkeypatch.setattr(module, "_running", running)
    monkeypatch.setattr(module._Places, "wait_for", lambda *_: None)
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    return changes


def test_the_rows_compare_as_the_targets_are_meant(tmp_path: Path, spoiled: Any) -> None:
    rows = module.bench_engine(quick(tmp_path)).rows
    saved, recomputed, example = [(row.ratio, row.ok) for row in rows]
    assert saved == (0.8, False)
    assert recomputed == (pytest.approx(0.1), True)
    assert example == (pytest.approx(0.5), True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"answer": ((9, 9),)}, "answered differently"), ({"served_tokens": 0}, "served 0 tokens")],
)
def test_a_replica_that_did_not_load_or_answers_otherwise_is_no_result(
    tmp_path: Path, spoiled: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    spoiled |= wrong
    with pytest.raises(ObjkvError, match=message):
        module.bench_engine(quick(tmp_path))
