"""What an engine of ``bench engine`` is asked, and what it answers: plain values, as JSON lines."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from objkv.ops.demo.job import VOCABULARY, Size

# What ``objkv.connector.programs.bench_gpu`` tells: plain values, as a JSON line.


class GpuAnswer(BaseModel):
    """Seconds by side, one per round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    nbytes: int
    """That each side moved in a round."""
    seconds: Mapping[str, Sequence[float]]
    """``to_device`` and ``to_host``, the limits; ``load``, ``gather``, ``compute``, and ``both``:
    load and compute at once."""


# What ``objkv.connector.programs.bench_steps`` tells: plain values, as a JSON line.


class StepsAnswer(BaseModel):
    """Seconds of the scheduler's thread."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrival_s: float
    """When a request arrives, the median over requests."""
    step_median_s: float
    step_p95_s: float
    """In one step, while the request's lookup is in flight."""


Connector = Literal["none", "objkv", "objkv-loads", "example", "example-loads"]
"""``-loads``: a second replica, which only loads what the first one saved."""
_SPECIAL = 3


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineJob(_Value):
    """One engine's whole life."""

    size: Size
    models: Path
    """Folder in which the model is made, unless it is there."""
    connector: Connector
    folder: Path
    """Where the example connector keeps what it saves."""
    longest: int
    """Tokens of the longest prompt with its answer."""


class Batch(_Value):
    """Answer prompts at once, of which nobody has seen any before."""

    kind: Literal["batch"] = "batch"
    seed: int
    prompts: int
    tokens: int
    answer: int


class Ask(_Value):
    """Answer the first ``tokens`` tokens of a document, alone."""

    kind: Literal["ask"] = "ask"
    seed: int
    tokens: int


Order = Annotated[Batch | Ask, Field(discriminator="kind")]
ORDER: Final[TypeAdapter[Batch | Ask]] = TypeAdapter(Order)


class Ready(_Value):
    """The engine runs."""

    engine: str
    device: str


class Took(_Value):
    """What came of an order."""

    seconds: float
    """For the whole batch; for one prompt, until its first token."""
    busy_s: float
    """CPU time of the engine's own thread meanwhile: what else runs here does not count."""
    answer: tuple[tuple[int, ...], ...]
    """Token ids, by prompt."""
    served_tokens: int
    """Of the prompts, by the connector or from the engine's own cache."""


def tokens_of(seed: int, count: int, *, prompt: int = 0) -> list[int]:
    """Token ids of a made-up text; of two lengths the shorter begins the longer."""
    source = random.Random(f"{seed} {prompt}")
    return [source.randrange(_SPECIAL, VOCABULARY) for _ in range(count)]
