"""One replica of ``demo`` or ``gpu-check``: its setup, its answers, and its run to the end.

Both run three, one after the other. R runs without objkv. A and B have an empty store in common: A
computes and saves, B loads. ``objkv.programs.replica`` is the process of each.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from objkv.ops.programs import Program

Replica = Literal["R", "A", "B"]
Shape = Literal["normal", "small", "gpu"]
"""Of a random model. The first two are for CPUs too; the last has the shape of Llama 3.2 1B."""
ReportStage = Callable[[str, str], None]
"""``(replica, stage)``: called when a stage begins."""

VOCABULARY: Final = 1024
"""Number of token ids of random models; the first three are special (begin, end, padding)."""
ANSWER_TOKENS: Final = 8
"""Enough tokens for a wrong block to show; a single one may be right by chance."""
CONNECTOR: Final = {"kv_connector": "ObjKVConnector", "kv_role": "kv_both"}
"""``--kv-transfer-config``."""
_SPECIAL = 3
REPLICAS: Final[Mapping[Replica, str]] = {
    "R": "replica R (without objkv)",
    "A": "replica A (computes, saves)",
    "B": "replica B (loads)",
}


def random_tokens(name: str, length: int) -> tuple[int, ...]:
    """Return the ``length`` token ids of a text, the same in every process."""
    source = random.Random(name)
    return tuple(source.randrange(_SPECIAL, VOCABULARY) for _ in range(length))


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReplicaPrompt(_Value):
    """One request."""

    name: str
    texts: tuple[tuple[str, int], ...]
    """Names and lengths of the texts that follow one another, see ``random_tokens``."""
    forget: bool = True
    """Whether the replica empties its own prefix cache before it."""

    @property
    def length(self) -> int:
        return sum(length for _, length in self.texts)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for text in self.texts for token in random_tokens(*text))


class ReplicaSetup(_Value):
    """The argument of the program of one replica, as JSON."""

    role: Replica
    model: str | None = None
    """Name or folder of a model; null for one with random weights."""
    shape: Shape
    """Of the random model. With ``gpu``, the engine has vLLM's defaults on a GPU."""
    models: Path
    """Folder in which random models are created and kept."""
    prompts: tuple[ReplicaPrompt, ...]

    @property
    def longest(self) -> int:
        return max(prompt.length for prompt in self.prompts)


class ReplicaAnswer(_Value):
    """A replica's answer to one prompt."""

    prompt: str
    tokens: tuple[int, ...]
    served_tokens: int
    """Tokens of the prompt that objkv, or with ``forget`` false the engine's own cache, served."""
    first_token_s: float


class ReplicaEnd(_Value):
    """The last event of a replica that stopped normally."""

    engine: str
    device: str
    load_failures: int


class ReplicaEvent(_Value):
    """One line of a replica's output; exactly one field is set."""

    stage: str | None = None
    """The stage that begins now."""
    answer: ReplicaAnswer | None = None
    end: ReplicaEnd | None = None


def live(
    setup: ReplicaSetup,
    log: Path,
    settings: Mapping[str, str],
    report_stage: ReportStage,
    *,
    bound_s: float,
) -> tuple[list[ReplicaAnswer], ReplicaEnd]:
    """Run one replica from start to exit. Raises ``ProgramFailed``, also after ``bound_s``."""
    name, answers, end = REPLICAS[setup.role], list[ReplicaAnswer](), None
    arguments = ("-m", "objkv.programs.replica", setup.model_dump_json())
    report_stage(name, "starting Python")
    with Program(name, arguments, log, settings) as program:
        for line in program.lines(bound_s=bound_s):
            event = ReplicaEvent.model_validate_json(line)
            if event.stage is not None:
                report_stage(name, event.stage)
            if event.answer is not None:
                answers.append(event.answer)
            end = event.end
        if end is None:
            raise program.failed("ended without its last event")
    return answers, end
