"""What the demo shows: one row per prompt, what is stored, and whether it all holds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from objkv.config import Config
from objkv.ops.demo.job import Answer, Prompt

_CHUNK_TOKENS: int = Config.model_fields["chunk_tokens"].default


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt and how long its first token took; None where a replica was not asked."""

    prompt: str
    prompt_tokens: int
    served_tokens: int
    """Tokens of the prompt that objkv served to replica B."""
    recompute_s: float
    """Without objkv."""
    first_s: float | None
    """On replica A, which computes and saves."""
    second_s: float
    """On replica B, which loads."""
    identical: bool
    """Whether all answers to the prompt are the same tokens."""

    @property
    def speed_up(self) -> float:
        """How many times sooner the first token is there."""
        return self.recompute_s / self.second_s

    @property
    def complete(self) -> bool:
        """Whether objkv served every whole chunk of what replica A was asked as well."""
        chunks = self.prompt_tokens // _CHUNK_TOKENS
        return self.first_s is None or self.served_tokens >= chunks * _CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Stored:
    """What the two replicas left behind, and where."""

    chunks: int
    tokens: int
    nbytes: int
    settings: Mapping[str, str]
    """Environment variables that lead to it."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole demo."""

    engine: str
    device: str
    rows: tuple[Row, ...]
    load_failures: int
    """Loads of which something had to be computed after all."""
    stored: Stored
    notices: tuple[str, ...]
    """What was not as it should be: stand-ins for servers that are missing."""
    metrics: Mapping[str, Mapping[str, float]]
    """Per replica, counters as its ``/metrics`` tells them; empty without servers."""

    @property
    def speed_up_median(self) -> float:
        """Over all prompts."""
        return statistics.median(row.speed_up for row in self.rows)

    @property
    def identical(self) -> bool:
        """Whether every answer is what the model computes without objkv."""
        return all(row.identical for row in self.rows)

    @property
    def served(self) -> bool:
        """Whether anything came from objkv."""
        return any(row.served_tokens for row in self.rows)

    @property
    def fine(self) -> bool:
        """Whether the demo showed what it is there to show."""
        return self.identical and self.served


def compare(
    prompts: Sequence[Prompt],
    recomputed: Mapping[str, Answer],
    first: Mapping[str, Answer],
    second: Mapping[str, Answer],
) -> tuple[Row, ...]:
    """One row per prompt, from what each replica answered by prompt name."""
    return tuple(
        _row(prompt, recomputed[prompt.name], first.get(prompt.name), second[prompt.name])
        for prompt in prompts
    )


def _row(prompt: Prompt, recomputed: Answer, first: Answer | None, second: Answer) -> Row:
    assert recomputed.served_tokens == 0
    answers = {answer.tokens for answer in (recomputed, first, second) if answer is not None}
    return Row(
        prompt=prompt.name,
        prompt_tokens=len(prompt.tokens),
        served_tokens=second.served_tokens,
        recompute_s=recomputed.first_token_s,
        first_s=None if first is None else first.first_token_s,
        second_s=second.first_token_s,
        identical=len(answers) == 1,
    )
