"""What a replica is asked to do, and what it answers: plain values that cross as JSON."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tests.engine.model import VOCABULARY, ModelName

_SPECIAL = 3
"""Ids below have a meaning (begin, end, padding)."""


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


def tokens_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """``length`` token ids; those of one seed continue each other: shorter ones are prefixes."""
    source = random.Random(seed)
    return tuple(source.randrange(_SPECIAL, VOCABULARY) for _ in range(length))


def prompt_of(length: int, *, seed: int = 0, max_tokens: int = 8) -> Prompt:
    return Prompt(tokens=tokens_of(length, seed=seed), max_tokens=max_tokens)


class Generate(_Value):
    """Run prompts, all at once but for their ``after_steps``, until all are finished."""

    prompts: tuple[Prompt, ...]


class Call(_Value):
    """Call ``module:function(llm, **arguments)`` inside the replica; its answer must be JSON."""

    function: str
    arguments: dict[str, Any] = {}


Step = Generate | Call


def generate(*prompts: Prompt) -> Generate:
    return Generate(prompts=prompts)


def call(function: Callable[..., Any], **arguments: Any) -> Call:
    return Call(function=f"{function.__module__}:{function.__name__}", arguments=arguments)


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
    """Per ``Call``."""
    metrics: dict[str, float]
    """vLLM's counters and gauges, a connector's own included; ``name`` or ``name{label=value}``."""
    agent: dict[str, float] = {}
    """Numbers of the replica's own agent, when the replica had ended and when the agent had."""
    warnings: tuple[LogLine, ...]
    """Of the replica's first process; what other processes logged is in ``log``."""
    log: str = ""
    """Everything the replica printed."""
    stop_s: float

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [output.tokens for outputs in self.outputs for output in outputs]

    @property
    def cached(self) -> list[int | None]:
        return [output.cached_tokens for outputs in self.outputs for output in outputs]
