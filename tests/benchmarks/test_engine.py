"""``benchmarks.engine`` with fake engines: which is asked what, and what is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine as module
from benchmarks.engine_child import Ask, Batch, Ready, Took, tokens_of
from objkv.errors import ObjkvError
from tests.ops.bench.setting import quick

SECONDS = {"none": 1.0, "objkv": 1.25, "objkv-loads": 0.1, "example": 0.3, "example-loads": 0.2}


class FakeEngine:
    """Takes as long as its name says; is served what was asked before, if it loads."""

    def __init__(self, name: str, asked: list[tuple[str, Batch | Ask]]) -> None:
        self.name = name
        self.ready = Ready(engine="vLLM 0", device="nothing")
        self._asked = asked

    def do(self, order: Batch | Ask) -> Took:
        self._asked.append((self.name, order))
        loads = isinstance(order, Ask) and self.name != "none"
        return Took(
            seconds=SECONDS[self.name],
            busy_s=SECONDS[self.name] / 2,
            answer=((1, 2),),
            served_tokens=512 if loads else 0,
        )


Asked = list[tuple[str, Batch | Ask]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    orders: Asked = []

    @contextmanager
    def running(_setting: Any, _scale: Any, _places: Any, name: str) -> Iterator[FakeEngine]:
        yield FakeEngine(name, orders)

    monkeypatch.setattr(module, "_running", running)
    monkeypatch.setattr(module._Places, "wait_for", lambda *_: None)
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    return orders


def test_engines_take_turns_and_no_two_of_them_are_asked_the_same_batch(
    tmp_path: Path, asked: Asked
) -> None:
    module.bench_engine(quick(tmp_path, rounds=2))
    batches = [(name, order.seed) for name, order in asked if isinstance(order, Batch)]
    names = [name for name, _ in batches]
    assert names[:3] == names[5:2:-1] == names[6:9]
    assert len({seed for _, seed in batches}) == len(batches)


def test_the_rows_compare_as_the_targets_are_meant(tmp_path: Path, asked: Asked) -> None:
    both, busy, loads, _, recomputed, example = module.bench_engine(quick(tmp_path)).rows
    assert (both.ratio, both.ok) == (0.8, False)
    assert (busy.ratio, busy.ok) == (1.25, None)
    assert (loads.ratio, loads.ok) == (10.0, None)
    assert (recomputed.ratio, recomputed.ok) == (pytest.approx(0.1), True)
    assert (example.ratio, example.ok) == (pytest.approx(0.5), True)


def wrong_answer(took: Took) -> Took:
    return took.model_copy(update={"answer": ((9, 9),)})


def nothing_served(took: Took) -> Took:
    return took.model_copy(update={"served_tokens": 0})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(wrong_answer, "answered differently"), (nothing_served, "was served 0 tokens")],
)
def test_a_replica_that_did_not_load_or_answers_otherwise_is_no_result(
    tmp_path: Path,
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Took], Took],
    message: str,
) -> None:
    do = FakeEngine.do

    def spoiled(engine: FakeEngine, order: Batch | Ask) -> Took:
        took = do(engine, order)
        return spoil(took) if engine.name == "objkv-loads" and isinstance(order, Ask) else took

    monkeypatch.setattr(FakeEngine, "do", spoiled)
    with pytest.raises(ObjkvError, match=message):
        module.bench_engine(quick(tmp_path))


def test_without_vllm_it_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    section = module.bench_engine(quick(tmp_path))
    assert section.skipped
    assert "pip install" in section.notes[0]


def test_of_two_prompts_with_one_seed_the_shorter_begins_the_longer() -> None:
    assert tokens_of(-1, 30)[:20] == tokens_of(-1, 20)
    assert tokens_of(1, 20) != tokens_of(2, 20) != tokens_of(2, 20, prompt=1)
