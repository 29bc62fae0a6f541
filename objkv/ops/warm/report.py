"""What a run of ``warm`` did, as it is told: numbers, and the prompts that it could not warm."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from objkv.ops.warm.promote import PromoteReport

Ending = Literal["complete", "interrupted", "unreachable"]
NAMED_MAX = 1000


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that is not stored."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """What one endpoint, or the engine here, did."""

    name: str
    answered: int
    tokens: int
    errors: int
    is_down: bool
    last_error: str


@dataclass(slots=True)
class WarmReport:
    """One run; ``earlier`` is what runs did that it continues."""

    mode: str
    """``endpoints``, ``engine``, ``promote`` or ``check``."""
    namespace: str = ""
    model: str = ""
    ending: Ending = "complete"
    prompts: int = 0
    stored_before: int = 0
    """Prompts of which everything was stored already."""
    short: int = 0
    """Prompts that fill no chunk: nothing of them can be stored."""
    warmed: int = 0
    """Prompts that are stored now, and were not before."""
    shared: int = 0
    """Those of the warmed that were not asked: others have all their chunks."""
    failed: int = 0
    left: int = 0
    """Prompts that an early end left."""
    prompt_tokens: int = 0
    """Of all prompts."""
    asked_tokens: int = 0
    """Of the prompts that were answered."""
    cached_tokens: int | None = None
    """Those of the asked that were not computed but loaded, or still in an engine; None if nobody
    told."""
    saved_chunks: int = 0
    saved_bytes: int = 0
    """Newly stored."""
    retries: int = 0
    seconds: float = 0.0
    endpoints: list[EndpointReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    """The first thousand."""
    resumed: bool = False
    earlier: dict[str, int] = field(default_factory=dict)
    why: str = ""
    """Why it ended early."""
    promotion: PromoteReport | None = None
    """Of ``promote`` only."""

    @property
    def is_complete(self) -> bool:
        """Whether every prompt that can be stored is stored; of ``promote``, also hot."""
        is_hot = self.promotion is None or not self.promotion.failed
        return self.ending == "complete" and not self.failed and is_hot

    @property
    def done(self) -> int:
        """Prompts that there is nothing more to do about."""
        return self.stored_before + self.short + self.warmed + self.failed

    def fail(self, name: str, why: str) -> None:
        """A prompt could not be warmed."""
        self.failed += 1
        self.name(name, why)

    def name(self, name: str, why: str) -> None:
        """Tell of a prompt, or a payload, by name, while there is room."""
        if len(self.failures) < NAMED_MAX:
            self.failures.append(Failure(name, why))

    def plain(self) -> dict[str, Any]:
        """As the JSON document has it."""
        document = {"command": "warm", "complete": self.is_complete, **asdict(self)}
        document["omitted"] = max(0, self.failed - len(self.failures))
        return document
