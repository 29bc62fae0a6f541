"""The report of a ``warm`` run: totals, and the prompts that failed."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Ending = Literal["complete", "interrupted", "unreachable"]
NAMED_MAX = 1000


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that is not stored."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """The totals of one endpoint or of the local engine."""

    name: str
    answered: int
    tokens: int
    errors: int
    is_down: bool
    last_error: str


@dataclass(slots=True)
class WarmReport:
    """The report of one run."""

    mode: str
    """``endpoints``, ``engine`` or ``check``."""
    namespace: str = ""
    model: str = ""
    ending: Ending = "complete"
    prompts: int = 0
    stored_before: int = 0
    """Prompts already stored completely."""
    short: int = 0
    """Prompts shorter than one chunk, which cannot be stored."""
    warmed: int = 0
    """Prompts stored now but not before."""
    shared: int = 0
    """Warmed prompts that needed no request, because other prompts have all their chunks."""
    failed: int = 0
    left: int = 0
    """Prompts not processed because of an early end."""
    prompt_tokens: int = 0
    """Tokens of all prompts."""
    asked_tokens: int = 0
    """Tokens of the prompts that were sent and answered."""
    cached_tokens: int | None = None
    """The part of ``asked_tokens`` loaded or found in an engine's cache; None if not reported."""
    saved_chunks: int = 0
    saved_bytes: int = 0
    """Newly stored bytes."""
    retries: int = 0
    seconds: float = 0.0
    endpoints: list[EndpointReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    """The first thousand failures."""
    why: str = ""
    """The reason of an early end."""

    @property
    def is_complete(self) -> bool:
        """Whether every prompt that can be stored is stored."""
        return self.ending == "complete" and not self.failed

    @property
    def done(self) -> int:
        """Prompts that are finished."""
        return self.stored_before + self.short + self.warmed + self.failed

    def fail(self, name: str, why: str) -> None:
        """Count and name a prompt that could not be warmed."""
        self.failed += 1
        self.name(name, why)

    def name(self, name: str, why: str) -> None:
        """Name a failed prompt or payload, up to ``NAMED_MAX``."""
        if len(self.failures) < NAMED_MAX:
            self.failures.append(Failure(name, why))

    def plain(self) -> dict[str, Any]:
        """Return the JSON document."""
        document = {"command": "warm", "complete": self.is_complete, **asdict(self)}
        document["omitted"] = max(0, self.failed - len(self.failures))
        return document
