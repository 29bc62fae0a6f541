"""What a replica of the demo is asked, and what it tells meanwhile: plain values, as JSON lines."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Size = Literal["normal", "small"]

VOCABULARY: Final = 1024
"""Token ids of the demo's model, of which the first three have a meaning (begin, end, padding)."""
ANSWER_TOKENS: Final = 8
"""Enough for a wrong block to show: one token may be right by chance."""
KV_CACHE_BYTES: Final = 256 << 20
"""Room for several prompts at once; not what the machine has: it may have other things to do."""
CONNECTOR: Final = {
    "kv_connector": "ObjKVConnector",
    "kv_role": "kv_both",
}
"""``--kv-transfer-config``, as anybody would write it."""
_SPECIAL = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """How long the demo's prompts are, in tokens."""

    documents: tuple[int, int]
    question: int

    @property
    def longest(self) -> int:
        """The longest prompt with its answer."""
        return max(self.documents) + self.question + ANSWER_TOKENS


# Documents end where a chunk of 256 tokens ends, and a question is longer than a chunk: a prompt
# that was asked before is served further than one that only shares the document.
SCALES: Final[dict[Size, Scale]] = {
    "normal": Scale(documents=(1536, 3072), question=300),
    "small": Scale(documents=(512, 1024), question=300),
}


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Prompt(_Value):
    """One request."""

    name: str
    tokens: tuple[int, ...]
    asked_before: bool
    """Whether the first replica is asked it too; if not, it only shares a document with one."""


class Job(_Value):
    """One replica's whole life."""

    size: Size
    models: Path
    """Folder in which the model is made, unless it is there."""
    connector: bool
    warm_up: tuple[int, ...]
    """A prompt that is asked first and not told of: it pays what is paid once."""
    prompts: tuple[Prompt, ...]


class Stage(_Value):
    """What the replica does from now on."""

    kind: Literal["stage"] = "stage"
    text: str


class Answer(_Value):
    """What came of one prompt."""

    kind: Literal["answer"] = "answer"
    prompt: str
    tokens: tuple[int, ...]
    served_tokens: int
    """Tokens of the prompt that objkv served."""
    first_token_s: float


class Done(_Value):
    """The replica stopped in good order."""

    kind: Literal["done"] = "done"
    engine: str
    device: str
    load_failures: int


Event = Annotated[Stage | Answer | Done, Field(discriminator="kind")]
EVENT: TypeAdapter[Stage | Answer | Done] = TypeAdapter(Event)


def prompts_of(size: Size) -> tuple[Prompt, ...]:
    """Two questions about each of two documents, the first of which is asked before."""
    scale = SCALES[size]
    return tuple(
        Prompt(
            name=f"document {document}, question {question}",
            tokens=_tokens(f"document {document}", length)
            + _tokens(f"question {question}", scale.question),
            asked_before=question == 1,
        )
        for document, length in enumerate(scale.documents, 1)
        for question in (1, 2)
    )


def warm_up_of(size: Size) -> tuple[int, ...]:
    """A prompt as long as the longest, of which no other is a beginning."""
    scale = SCALES[size]
    return _tokens("warm-up", max(scale.documents) + scale.question)


def _tokens(name: str, length: int) -> tuple[int, ...]:
    source = random.Random(name)
    return tuple(source.randrange(_SPECIAL, VOCABULARY) for _ in range(length))
