"""What a target is."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


class Finding(Exception):
    """A broken promise. Not an assertion, so that nothing is left out under ``python -O``."""


def require(condition: object, what: object) -> None:
    """Raise ``Finding`` unless ``condition`` holds."""
    if not condition:
        raise Finding(what)


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that is read."""

    name: str
    make: Callable[[Random], Any]
    """An example."""
    check: Callable[[Any], str]
    """Raises for a broken promise; what came of the example in a word."""


def outcome(refusals: type[Exception] | tuple[type[Exception], ...]) -> Any:
    """Makes ``check`` of what raises ``refusals``, and nothing else, for what it does not take."""

    def wrap(read: Callable[[Any], str | None]) -> Callable[[Any], str]:
        def check(example: Any) -> str:
            try:
                return read(example) or "read"
            except refusals as exc:
                require(len(str(exc)) < 100_000, "an error of a novel's length")
                return "refused"

        return check

    return wrap
