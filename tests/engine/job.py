"""What a replica is asked to do, and what it answers: plain values that cross as JSON."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tests.engine.model import ModelName


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Prompt(_Value):
    tokens: tuple[int, ...]
    max_tokens: int = 8
    cache_salt: str | None = None
    after_steps: int = 0
    """Engine steps of its ``Generate`` that pass before it arrives."""
    abort_after_steps: int | None = None
    """Abort it so many engine steps after it arrived. A load in progress steps without tokens."""
    abort_when: Path | None = None
    """Abort it when this file exists and all prompts but those with such a file are finished."""
    lora: Path | None = None
    """Folder of an adapter; the job's engine arguments must enable LoRA."""


class Generate(_Value):
    """Run prompts, all at once but for their ``after_steps``, until all are finished."""

    kind: Literal["generate"] = "generate"
    prompts: tuple[Prompt, ...]


class ResetPrefixCache(_Value):
    """Forget the replica's own KV cache, so that only a connector can bring a prefix back."""

    kind: Literal["reset"] = "reset"
    connector: bool = False
    """Whether the connector is asked to reset as well."""


class Settle(_Value):
    """Let the engine step until no finished request is held back by a connector."""

    kind: Literal["settle"] = "settle"
    seconds_max: float = 300.0


class WaitFor(_Value):
    """Wait until a file exists: how a scenario, or another replica, says go."""

    kind: Literal["wait"] = "wait"
    path: Path
    seconds_max: float = 600.0


class Touch(_Value):
    """Create an empty file, for somebody's ``WaitFor``."""

    kind: Literal["touch"] = "touch"
    path: Path


class Call(_Value):
    """Call ``module:function(llm, **arguments)`` inside the replica; its answer must be JSON."""

    kind: Literal["call"] = "call"
    function: str
    arguments: dict[str, Any] = {}


Step = Annotated[
    Generate | ResetPrefixCache | Settle | WaitFor | Touch | Call, Field(discriminator="kind")
]


class Job(_Value):
    """One replica's whole life: start, steps in order, orderly shutdown."""

    steps: tuple[Step, ...]
    model: ModelName = "llama"
    connector: dict[str, Any] | None = None
    """``kv_transfer_config``; None runs vLLM alone."""
    engine: dict[str, Any] = {}
    """Arguments of ``vllm.LLM`` that differ from the harness's."""
    env: dict[str, str] = {}
    """Added to the replica's environment, from which all ``OBJKV_`` and ``VLLM_`` are removed.
    What Python or its libraries read as they start needs a ``fresh`` process."""
    processes: bool = False
    """Engine core and workers in processes of their own, as ``vllm serve`` has them. Slower."""
    fresh: bool = False
    """A Python of its own, not a fork of one: for what is told of a process's start and end."""
    timeout_s: float = 1_200.0
    """From start to exit; the whole process group is killed then. Far more than a busy machine
    needs: it is there for what hangs."""


class Output(_Value):
    tokens: tuple[int, ...]
    cached_tokens: int | None
    """Prompt tokens that were not computed, from the replica's own cache or a connector."""
    finish_reason: str | None
    """``length``, ``stop``, ``error``, or ``abort`` for a prompt that the job aborted."""
    seconds: float
    """From arrival to the last token."""
    steps: int
    """Engine steps from arrival to the last token."""


class LogLine(_Value):
    """Something that was logged at WARNING or above, by vLLM or objkv."""

    level: str
    logger: str
    message: str


class Result(_Value):
    """What a replica answers."""

    outputs: tuple[tuple[Output, ...], ...]
    """Per ``Generate``, per prompt."""
    answers: tuple[Any, ...]
    """Per ``Call`` its answer, per ``ResetPrefixCache`` and ``Settle`` whether it succeeded."""
    metrics: dict[str, float]
    """vLLM's counters and gauges, a connector's own included; ``name`` or ``name{label=value}``."""
    agent: dict[str, float] = {}
    """Numbers of the replica's own agent, when the replica had ended and when the agent had."""
    warnings: tuple[LogLine, ...]
    """Of the replica's first process; what other processes logged is in ``log``."""
    log: str
    """Everything the replica printed."""
    seconds: dict[str, float]
    """``import``, ``start``, ``steps``, ``stop``, and ``total`` as seen from outside."""

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [output.tokens for outputs in self.outputs for output in outputs]

    @property
    def cached(self) -> list[int | None]:
        return [output.cached_tokens for outputs in self.outputs for output in outputs]
