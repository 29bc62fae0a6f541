"""Work in steps, done at once on the caller's thread."""

import select
from typing import Any, TypeVar

from objkv.background import Steps
from tests.support.waiting import PATIENCE_S

T = TypeVar("T")


def complete(steps: Steps[T]) -> T:
    """Its outcome. Waits for each answer."""
    answer = None
    while True:
        try:
            question = next(steps) if answer is None else steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        answer = None
        if question is None:
            continue
        try:
            assert question.line.send(question.message)
            poll = select.poll()
            poll.register(question.line.fileno(), select.POLLIN)
            assert poll.poll(1000 * PATIENCE_S)
            answer = question.line.receive()
        except Exception as exc:
            try:
                steps.throw(exc)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            raise AssertionError("another question after a lost one") from exc


class Completed:
    """The calls of something that works in steps, each done at once."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        return lambda *args, **how: complete(call(*args, **how))
