"""``warm`` with an engine of the caller's: what becomes of requests when the engine fails."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from objkv.ops.warm.prefill import PrefillError, PrefillReply, PrefillRequest
from objkv.programs.warm import LlmAsker

BOUND_S = 60
"""Against a hang; nothing takes this long."""
ASK = PrefillRequest([1, 2], None, None)


class EngineDeadError(Exception):
    """As vLLM's, which is none of ValueError and TypeError."""


@dataclass
class Engine:
    """An engine that answers at once, until it dies in a step."""

    dies: bool = False
    of: type[BaseException] = EngineDeadError
    refuses: Exception | None = None
    names: list[str] = field(default_factory=list)

    def add_request(self, name: str, *_: Any, **__: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.names.append(name)

    def step(self) -> list[SimpleNamespace]:
        if self.dies:
            raise self.of("EngineCore encountered an issue")
        names, self.names = self.names, []
        answered = {"finished": True, "num_cached_tokens": 0}
        return [SimpleNamespace(request_id=name, **answered) for name in names]

    def abort_request(self, names: list[str]) -> None:
        """Nothing is left to abort."""


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def asker(engine: Engine) -> Iterator[LlmAsker]:
    asker = LlmAsker(SimpleNamespace(llm_engine=engine))
    yield asker
    asker.close()


def trouble(future: "Future[PrefillReply]") -> str:
    with pytest.raises(PrefillError) as raised:
        future.result(BOUND_S)
    return raised.value.trouble


@pytest.mark.parametrize("of", [EngineDeadError, SystemExit])
def test_an_engine_that_dies_fails_what_it_has_and_all_that_comes(
    asker: LlmAsker, engine: Engine, of: type[BaseException]
) -> None:
    assert asker.begin(ASK).result(BOUND_S) == PrefillReply(0)
    engine.dies, engine.of = True, of
    for _ in range(3):
        assert trouble(asker.begin(ASK)) == "down"
    with pytest.raises(PrefillError, match="EngineCore encountered an issue"):
        asker.check()


def test_what_cannot_be_asked_is_refused_and_the_engine_lives_on(
    asker: LlmAsker, engine: Engine
) -> None:
    assert trouble(asker.begin(PrefillRequest([1], None, "known-by-its-digest"))) == "refused"
    engine.refuses = ValueError("too long")
    assert trouble(asker.begin(ASK)) == "refused"
    engine.refuses = None
    assert asker.begin(ASK).result(BOUND_S) == PrefillReply(0)
    engine.refuses = EngineDeadError("it is dead already")
    assert trouble(asker.begin(ASK)) == "down"
    with pytest.raises(PrefillError, match="the engine failed"):
        asker.check()


def test_after_its_end_nothing_is_taken_and_the_check_says_so(asker: LlmAsker) -> None:
    asker.close()
    assert trouble(asker.begin(ASK)) == "down"
    with pytest.raises(PrefillError, match="the engine was closed"):
        asker.check()
