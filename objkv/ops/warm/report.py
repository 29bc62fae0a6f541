"""Limits and report of a ``warm`` run: totals, and the prompts that failed."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Ending = Literal["complete", "interrupted", "unreachable"]
NAMED_MAX = 1000


@dataclass(frozen=True, slots=True)
class WarmLimits:
    attempts_max: int = 4
    """Attempts per prompt, not counting busy answers."""
    busy_max: int = 100
    """Busy answers per prompt."""
    save_s: float = 60.0
    """Time from the answer until the prompt is stored; afterwards it is sent again."""
    gone_s: float = 120.0
    """The run ends when no endpoint has answered for this time."""
    pause_s: float = 0.05
    """Pause between lookups of a pending save; grows to ten times this."""


@dataclass(frozen=True, slots=True)
class Failure:
    name: str
    why: str


@dataclass(slots=True)
class EndpointReport:
    name: str
    answered: int = 0
    errors: int = 0
    last_error: str = ""


@dataclass(slots=True)
class WarmReport:
    mode: str
    """``endpoints``, ``model`` or ``check``."""
    namespace: str = ""
    model: str = ""
    ending: Ending = "complete"
    prompts: int = 0
    stored_before: int = 0
    short: int = 0
    """Prompts shorter than one chunk, which cannot be stored."""
    warmed: int = 0
    failed: int = 0
    left: int = 0
    """Prompts not processed because of an early end."""
    asked_tokens: int = 0
    """Tokens of the prompts that were sent and answered."""
    cached_tokens: int = 0
    """The part of ``asked_tokens`` that was loaded or in an engine's cache, as far as reported."""
    saved_chunks: int = 0
    saved_bytes: int = 0
    """Newly stored bytes."""
    retries: int = 0
    seconds: float = 0.0
    endpoints: list[EndpointReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    """The first thousand failures."""
    why: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every prompt that can be stored is stored."""
        return self.ending == "complete" and not self.failed

    @property
    def done(self) -> int:
        return self.stored_before + self.short + self.warmed + self.failed

    def fail(self, name: str, why: str) -> None:
        """Count and name a prompt that could not be warmed."""
        self.failed += 1
        if len(self.failures) < NAMED_MAX:
            self.failures.append(Failure(name, why))

    def plain(self) -> dict[str, Any]:
        return {"command": "warm", "complete": self.is_complete, **asdict(self)}
