"""``gpu-check``: whether replicas share prompts on this machine's GPU without changing a token, and
how fast bytes are copied to it.

R computes all prompts without objkv. A and B share an empty store: A computes and saves, B loads. R
repeats each prompt from its own prefix cache, too: B computes exactly the same tokens after the
loaded ones, so that its answer must be equal, whatever the model and its rounding. The processes
are ``objkv.programs.gpu_facts`` and ``objkv.programs.replica``.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from objkv.errors import ConfigError
from objkv.ops.programs import Program, ProgramFailed
from objkv.ops.replica import Replica, ReplicaAnswer, ReplicaPrompt, ReplicaSetup, ReportStage, live

_QUESTION_TOKENS: Final = 8
"""Fewer than a block: a prefix cache of any block size ends where the stored chunks end."""
QUESTIONS: Final = (1, 2)
"""A computes the first question about each document only."""
_LENGTHS, _REPEATS = (8192, 16_384), 3
_FACTS_S, _REPLICA_S = 120.0, 420.0


def prompt_of(length: int, question: int, *, forget: bool = True) -> ReplicaPrompt:
    """Return a question about the document of this length."""
    return ReplicaPrompt(
        name=f"{length}, question {question}",
        texts=((f"document of {length}", length), (f"question {question}", _QUESTION_TOKENS)),
        forget=forget,
    )


def prompts_of(role: Replica, lengths: Sequence[int], repeats: int) -> Iterator[ReplicaPrompt]:
    """Yield what a replica answers about documents of these lengths."""
    first = QUESTIONS[0]
    for length in lengths:
        if role == "R":
            yield from [prompt_of(length, first)] * repeats
            yield from (prompt_of(length, question, forget=False) for question in QUESTIONS)
        elif role == "A":
            yield prompt_of(length, first)
        else:
            for question in QUESTIONS:
                yield from [prompt_of(length, question)] * repeats


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A device, and copies of page-locked memory, which limit all loads and saves."""

    device: str
    about: Mapping[str, str]
    """Lines about memory, driver and versions, by name."""
    to_device_gb_s: float
    to_host_gb_s: float
    link: str | None
    """PCIe speed and lanes; null if Linux does not know them."""
    link_gb_s: float | None
    """The rate of the link in each direction, as computed from its speed and lanes."""


@dataclass(frozen=True, slots=True)
class GpuCase:
    """One comparison."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The result of one run."""

    objkv: str
    model: str
    gpu: GpuFacts
    cases: tuple[GpuCase, ...]
    failure: str
    """The replica that failed, with the end of its log; empty if none did."""


Answers = Mapping[str, Sequence[ReplicaAnswer]]
"""A replica's answers, by the prompt's name."""


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """One run. ``folder`` is for store and logs; random models are kept in ``models``."""

    model: str | None
    """Name or folder of the replicas' model; None for one with random weights."""
    folder: Path
    models: Path
    report_stage: ReportStage
    lengths: tuple[int, ...] = _LENGTHS
    repeats: int = _REPEATS

    def facts(self) -> GpuFacts:
        """Describe the device. Raises ``ConfigError`` without one, and ``ProgramFailed``."""
        self.report_stage("GPU", "copying")
        arguments = ("-m", "objkv.programs.gpu_facts")
        with Program("the GPU process", arguments, self.folder / "facts.log", {}) as program:
            lines = list(program.lines(bound_s=_FACTS_S))
        if not lines:
            raise ConfigError(
                "PyTorch finds no GPU here: look at nvidia-smi or rocm-smi, and install the "
                "PyTorch for your GPU; without one, run make gpu SIMULATED=1 in a clone of objkv"
            )
        return GpuFacts(**json.loads(lines[-1]))

    def cases(self, found: list[GpuCase]) -> None:
        """Run the replicas, and add their comparisons to ``found``. Raises ``ProgramFailed``."""
        computed, _ = self._live("R")
        saved, _ = self._live("A")
        found += compare_saving(self.lengths, computed, saved)
        loaded, failures = self._live("B")
        found += compare_loading(self.lengths, computed, loaded)
        found.append(GpuCase("no load failed", not failures, f"{failures} failed"))

    def _live(self, role: Replica) -> tuple[Answers, int]:
        """Run one replica from start to exit. Return its answers and how many loads failed."""
        setup = ReplicaSetup(
            role=role,
            model=self.model,
            shape="gpu",
            models=self.models,
            prompts=tuple(prompts_of(role, self.lengths, self.repeats)),
        )
        log = self.folder / f"replica-{role}.log"
        # A model of this name may have to be downloaded.
        settings = {} if self.model is None else {"HF_HUB_OFFLINE": "0"}
        if role != "R":
            settings |= {
                "OBJKV_BULK_URL": f"file://{self.folder / 'chunks'}",
                "OBJKV_INDEX_URL": f"sqlite://{self.folder / 'index.sqlite'}",
                # Otherwise B would compute where that is faster, and nothing would be tested.
                "OBJKV_ADMISSION": "always",
            }
        found, end = live(setup, log, settings, self.report_stage, bound_s=_REPLICA_S)
        answers: dict[str, list[ReplicaAnswer]] = {}
        for one in found:
            answers.setdefault(one.prompt, []).append(one)
        return answers, end.load_failures


def run_check(check: GpuCheck, version: str) -> GpuReport:
    """Run everything. Raises ``ConfigError`` without a device, and ``ProgramFailed`` if it cannot
    be described; a replica that fails is part of the report."""
    facts, cases, failure = check.facts(), list[GpuCase](), ""
    try:
        check.cases(cases)
    except ProgramFailed as exc:
        failure = f"{exc.what}\n{exc.tail()}".strip()
    return GpuReport(
        version, check.model or "a Llama with random weights", facts, tuple(cases), failure
    )


def compare_saving(lengths: Sequence[int], alone: Answers, saving: Answers) -> Iterator[GpuCase]:
    """Yield a case for each document: whether saving it changes an answer."""
    for length in lengths:
        name = prompt_of(length, QUESTIONS[0]).name
        computed = {answer.tokens for answer in alone[name] if not answer.served_tokens}
        same = computed == {answer.tokens for answer in saving[name]}
        yield GpuCase(f"{name}: the same answer while saving", same)


def compare_loading(lengths: Sequence[int], alone: Answers, loading: Answers) -> Iterator[GpuCase]:
    """Yield two cases for each document and question: whether it was loaded, and its answer."""
    for length in lengths:
        computed = alone[prompt_of(length, QUESTIONS[0]).name]
        computed_s = _median_s(answer for answer in computed if not answer.served_tokens)
        for question in QUESTIONS:
            name = prompt_of(length, question).name
            served = min(answer.served_tokens for answer in loading[name])
            detail = f"{served:,} of {length:,} tokens; the first answer token after "
            detail += f"{_median_s(loading[name]):.2f} s, computed {computed_s:.2f} s"
            yield GpuCase(f"{name}: the document is loaded", served >= length, detail)
            cached = {answer.tokens for answer in alone[name] if answer.served_tokens}
            same = cached == {answer.tokens for answer in loading[name]}
            yield GpuCase(f"{name}: the same answer from loaded KV", same)


def _median_s(answers: Iterable[ReplicaAnswer]) -> float:
    return statistics.median(answer.first_token_s for answer in answers)
