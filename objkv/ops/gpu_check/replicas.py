"""Replicas that share long prompts, one after the other, and how soon each answers.

R computes all prompts without objkv. A and B share an empty store: A computes and saves, B loads.
If the engine can, N offloads to CPU memory by vLLM's own means. R repeats each prompt from its own
prefix cache, too: B computes exactly the same tokens after the loaded ones, so that its answer must
be equal, whatever the model and its rounding. ``objkv.connector.programs.check_replica`` is the
process of one replica.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from objkv.errors import ObjkvError
from objkv.ops.bench.harness import BenchRow, Tell
from objkv.ops.demo import DemoAnswer, ReplicaEnd, ReplicaEvent, random_tokens
from objkv.ops.gpu_check.report import GpuCase
from objkv.ops.programs import Program

Role = Literal["R", "A", "B", "N"]
QUESTION_TOKENS: Final = 8
"""Fewer than a block: a prefix cache of any block size ends where the stored chunks end."""
QUESTIONS: Final = (1, 2)
"""A computes the first question about each document only."""
_LENGTHS, _CPU_LENGTHS = (8192, 16_384), (1024, 2048)
_REPEATS = 3
_BOUND_S = 420.0
_NAMES: Final[Mapping[Role, str]] = {
    "R": "replica R (without objkv)",
    "A": "replica A (computes, saves)",
    "B": "replica B (loads)",
    "N": "replica N (vLLM's CPU offloading)",
}


class ReplicaSetup(BaseModel):
    """The argument of the program of one replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    model: str | None
    """Name or folder of a model; null for one with random weights."""
    models: Path
    """Folder in which that is created and kept."""
    lengths: tuple[int, ...]
    """Tokens of each document."""
    repeats: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.lengths) + QUESTION_TOKENS


def prompt_of(length: int, question: int) -> tuple[str, tuple[int, ...]]:
    """Return the name and the token ids of a question about the document of this length."""
    document = random_tokens(f"document of {length}", length)
    return f"{length}, question {question}", document + random_tokens(
        f"question {question}", QUESTION_TOKENS
    )


Answers = Mapping[str, Sequence[DemoAnswer]]
"""A replica's answers, by the prompt's name."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Runs the replicas. For one run."""

    model: str | None
    folder: Path
    """For the store and logs."""
    models: Path
    tell: Tell
    on_cpu: bool = field(kw_only=True)

    @property
    def _lengths(self) -> tuple[int, ...]:
        return _CPU_LENGTHS if self.on_cpu else _LENGTHS

    def run(self, cases: list[GpuCase], figures: list[BenchRow]) -> None:
        """Add the results. Raises ``ProgramFailed`` if R, A or B fails."""
        computed, _ = self._live("R")
        saved, _ = self._live("A")
        cases += compare_saving(self._lengths, computed, saved)
        loaded, end = self._live("B")
        cases += compare_loading(self._lengths, computed, loaded)
        failures = end.load_failures
        cases.append(GpuCase("no load failed", not failures, f"{failures} failed"))
        offloaded: Answers = {}
        name = "compared with vLLM's CPU offloading"
        if self.on_cpu:
            cases.append(GpuCase(name, None, "vLLM cannot offload on CPUs"))
        else:
            try:
                offloaded, _ = self._live("N")
            except ObjkvError as exc:
                cases.append(GpuCase(name, None, str(exc)))
        figures += compare_times(self._lengths, computed, loaded, offloaded)

    def _live(self, role: Role) -> tuple[Answers, ReplicaEnd]:
        """Run one replica from start to exit."""
        name, end = _NAMES[role], None
        answers: dict[str, list[DemoAnswer]] = {}
        setup = ReplicaSetup(
            role=role,
            model=self.model,
            models=self.models,
            lengths=self._lengths,
            repeats=1 if self.on_cpu else _REPEATS,
        )
        arguments = ("-m", "objkv.connector.programs.check_replica", setup.model_dump_json())
        self.tell(name, "starting Python")
        log = self.folder / f"replica-{role}.log"
        with Program(name, arguments, log, self._settings(role)) as program:
            for line in program.lines(bound_s=_BOUND_S):
                event = ReplicaEvent.model_validate_json(line)
                if event.stage is not None:
                    self.tell(name, event.stage)
                if event.answer is not None:
                    answers.setdefault(event.answer.prompt, []).append(event.answer)
                end = event.end
            if end is None:
                raise program.failed("ended without its last event")
        return answers, end

    def _settings(self, role: Role) -> dict[str, str]:
        # A model of this name may have to be downloaded.
        settings = {} if self.model is None else {"HF_HUB_OFFLINE": "0"}
        if role in ("R", "N"):
            return settings
        return settings | {
            "OBJKV_BULK_URL": f"file://{self.folder / 'chunks'}",
            "OBJKV_INDEX_URL": f"sqlite://{self.folder / 'index.sqlite'}",
            # Otherwise B would compute where that is faster, and nothing would be tested.
            "OBJKV_ADMISSION": "always",
        }


def compare_saving(lengths: Sequence[int], alone: Answers, saving: Answers) -> Iterator[GpuCase]:
    """Yield a case for each document: whether saving it changes an answer."""
    for length in lengths:
        name, _ = prompt_of(length, QUESTIONS[0])
        computed = {answer.tokens for answer in alone[name] if not answer.served_tokens}
        same = computed == {answer.tokens for answer in saving[name]}
        yield GpuCase(f"{name}: the same answer while saving", same)


def compare_loading(lengths: Sequence[int], alone: Answers, loading: Answers) -> Iterator[GpuCase]:
    """Yield two cases for each document and question: whether it was loaded, and its answer."""
    for length in lengths:
        for question in QUESTIONS:
            name, _ = prompt_of(length, question)
            served = min(answer.served_tokens for answer in loading[name])
            detail = f"{served:,} of {length:,} tokens were loaded"
            yield GpuCase(f"{name}: the document is loaded", served >= length, detail)
            cached = {answer.tokens for answer in alone[name] if answer.served_tokens}
            same = cached == {answer.tokens for answer in loading[name]}
            yield GpuCase(f"{name}: the same answer from loaded KV", same)


def compare_times(
    lengths: Sequence[int], alone: Answers, loading: Answers, offloading: Answers
) -> Iterator[BenchRow]:
    """Yield the times to the first token, in medians."""
    for length in lengths:
        name, _ = prompt_of(length, QUESTIONS[0])
        loaded_s = _median_s(loading[name])
        limits = {
            "recompute": [answer for answer in alone[name] if not answer.served_tokens],
            "vLLM's CPU offloading": [
                answer for answer in offloading.get(name, ()) if answer.served_tokens >= length
            ],
        }
        for limit, answers in limits.items():
            if not answers:
                continue
            limit_s = _median_s(answers)
            yield BenchRow(
                f"first token after {length:,} tokens, loaded by objkv",
                "ms",
                loaded_s * 1e3,
                limit_s * 1e3,
                limit,
                loaded_s / limit_s,
                detail="objkv's store is a directory here",
            )


def _median_s(answers: Sequence[DemoAnswer]) -> float:
    return statistics.median(answer.first_token_s for answer in answers)
