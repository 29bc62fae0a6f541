"""The protocol of prefillers, which compute prompts: an endpoint of a fleet or a local engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from objkv.errors import ObjkvError
from objkv.ops.warm.prompts import WarmPrompt

Trouble = Literal["busy", "down", "failed", "refused"]
TRANSFER_PARAMS: Final = {"objkv_put": True}
"""Of each request: node agents put its chunks at once, see ``connector.kv.request_limits``."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A request to compute a prompt and generate one token."""

    tokens: Sequence[int]
    salt: str | None
    model: str | None
    """The LoRA adapter; None means the base model."""


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """The prompt was computed. Its saves may still be in flight."""

    cached_tokens: int | None
    """Prompt tokens loaded, or found in the engine's own cache; None if not reported."""


class PrefillError(ObjkvError):
    """No reply. ``busy``: retry later. ``down``: the prefiller is unreachable, try another.
    ``failed``: only this request failed and may be retried. ``refused``: a retry would fail too."""

    def __init__(self, trouble: Trouble, why: str, *, after_s: float | None = None) -> None:
        super().__init__(why)
        self.trouble = trouble
        self.after_s = after_s
        """Seconds to wait before a retry, if the prefiller reported it."""


class Prefiller(Protocol):
    """Computes and saves prompts. Safe from many threads. Raises ``PrefillError``."""

    @property
    def name(self) -> str:
        """The name used in messages."""

    @property
    def at_once(self) -> int:
        """The maximum number of concurrent requests."""

    def check(self) -> None:
        """Return if the prefiller accepts requests."""

    def tokenize(self, prompt: WarmPrompt) -> list[int]:
        """Return the token ids that a request with this prompt would have."""

    def ask(self, ask: PrefillRequest) -> PrefillReply:
        """Compute the prompt and wait for the reply."""

    def close(self) -> None:
        """Cancel requests in flight. Idempotent."""
