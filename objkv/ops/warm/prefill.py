"""What whoever computes is asked and answers: an endpoint of a fleet, or an engine here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from objkv.errors import ObjkvError
from objkv.ops.warm.prompts import WarmPrompt

Trouble = Literal["busy", "down", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """One token after this prompt, please."""

    tokens: Sequence[int]
    salt: str | None
    model: str | None
    """The adapter to use; None is the base model."""


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """It was computed; what it saves may still be on its way."""

    cached_tokens: int | None
    """Of the prompt, loaded or from the engine's own cache; None if it does not tell."""


class PrefillError(ObjkvError):
    """No reply. ``busy``: later; ``down``: nobody is there, try another; ``failed``: this request
    only, it may be repeated; ``refused``: it will be refused again."""

    def __init__(self, trouble: Trouble, why: str, *, after_s: float | None = None) -> None:
        super().__init__(why)
        self.trouble = trouble
        self.after_s = after_s
        """Not before so many seconds, if it told."""


class Prefiller(Protocol):
    """Who computes prompts, and saves them. Safe from many threads; raises ``PrefillError``."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def at_once(self) -> int:
        """So many requests at a time."""

    def check(self) -> None:
        """Returns if it would take a request."""

    def tokenize(self, prompt: WarmPrompt) -> list[int]:
        """The token ids of a prompt, as a request of it would have them."""

    def ask(self, ask: PrefillRequest) -> PrefillReply:
        """Have it computed; waits."""

    def close(self) -> None:
        """Drop what is under way. Idempotent."""
