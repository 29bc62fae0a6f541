"""The demo: one replica reuses the KV that another one computed, on this machine."""

import fcntl
import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from objkv.config import Config, make_private
from objkv.errors import ConfigError
from objkv.ops.replica import (
    REPLICAS,
    Replica,
    ReplicaAnswer,
    ReplicaEnd,
    ReplicaPrompt,
    ReplicaSetup,
    ReportStage,
    live,
)

Size = Literal["normal", "small"]

_CHUNK_TOKENS: int = Config.model_fields["chunk_tokens"].default
_BOUND_S = 300.0
"""Limit from start to exit of one replica, which takes about 20 s on two free cores."""
# Documents end at a chunk boundary (256 tokens), and a question is longer than a chunk: more tokens
# are served for a repeated prompt than for one that shares only the document.
_QUESTION_TOKENS = 300
_DOCUMENTS: Final[dict[Size, tuple[int, int]]] = {"normal": (1536, 3072), "small": (512, 1024)}


def prompts_of(size: Size, replica: Replica = "B") -> tuple[ReplicaPrompt, ...]:
    """Two questions about each of two documents; replica A gets only the first ones."""
    return tuple(
        ReplicaPrompt(
            name=f"document {document}, question {question}",
            texts=((f"document {document}", length), (f"question {question}", _QUESTION_TOKENS)),
        )
        for document, length in enumerate(_DOCUMENTS[size], 1)
        for question in ((1,) if replica == "A" else (1, 2))
    )


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """The demo's folder with model, logs and store, below the user's cache folder."""

    root: Path

    @property
    def models(self) -> Path:
        """The folder of models, which the next demo reuses."""
        return self.root / "models"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def settings(self) -> dict[str, str]:
        return {
            "OBJKV_BULK_URL": f"file://{self.store / 'chunks'}",
            "OBJKV_INDEX_URL": f"sqlite://{self.store / 'index.sqlite'}",
        }

    def prompt_file(self, prompt: ReplicaPrompt) -> Path:
        """The file with the prompt's token ids, for ``objkv match --tokens``."""
        return self.root / "prompts" / f"{prompt.name.replace(', ', '-').replace(' ', '-')}.json"

    @contextmanager
    def prepared(self, prompts: Sequence[ReplicaPrompt]) -> Iterator[None]:
        """Empty the folder except for models, and lock it. Raises ``ConfigError`` if another demo
        holds the lock."""
        make_private(self.root)
        with (self.root / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise ConfigError(
                    f"another demo is running in {self.root}: wait until it ends"
                ) from exc
            for folder in (self.logs, self.root / "prompts", self.store):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            for prompt in prompts:
                self.prompt_file(prompt).write_text(json.dumps(prompt.tokens))
            yield


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One prompt with its times to the first token, in seconds."""

    prompt: str
    prompt_tokens: int
    served_tokens: int
    """Tokens of the prompt that objkv served to replica B."""
    recompute_s: float
    """Without objkv."""
    first_s: float | None
    """On replica A, which computes and saves; None if A did not get the prompt."""
    second_s: float
    """On replica B, which loads."""
    identical: bool
    """Whether all answers to the prompt are the same tokens."""
    speed_up: float
    """Time to first token without objkv, divided by that on replica B."""

    @property
    def complete(self) -> bool:
        """Whether objkv served every whole chunk, if replica A computed the same prompt."""
        chunks = self.prompt_tokens // _CHUNK_TOKENS
        return self.first_s is None or self.served_tokens >= chunks * _CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class DemoStore:
    """The totals stored by the replicas, and the location."""

    chunks: int
    tokens: int
    nbytes: int
    settings: Mapping[str, str]


@dataclass(slots=True)
class DemoReport:
    """The result of the demo."""

    engine: str
    device: str
    rows: tuple[DemoRow, ...]
    load_failures: int
    """Failed loads, whose tokens were recomputed."""
    stored: DemoStore
    notices: tuple[str, ...]
    speed_up_median: float = field(init=False)
    identical: bool = field(init=False)
    """Whether every answer equals the one computed without objkv."""
    served: bool = field(init=False)
    """Whether objkv served any tokens."""
    fine: bool = field(init=False)

    def __post_init__(self) -> None:
        self.speed_up_median = statistics.median(row.speed_up for row in self.rows)
        self.identical = all(row.identical for row in self.rows)
        self.served = any(row.served_tokens for row in self.rows)
        self.fine = self.identical and self.served


Answers = Mapping[str, ReplicaAnswer]
"""Answers by the prompt's name."""


def show_replicas(
    size: Size, place: DemoFolder, report_stage: ReportStage, count: Callable[[], DemoStore]
) -> DemoReport:
    """Run all three replicas, then call ``count()`` for the stored totals. Takes about a minute.
    Raises ``ConfigError`` and ``ProgramFailed``."""
    found = dict[Replica, tuple[Answers, ReplicaEnd]]()
    for replica in REPLICAS:
        # Agents of their own: B loads from the store, and not from the memory in which A saved.
        settings = {} if replica == "R" else place.settings
        prompts = prompts_of(size, replica)
        setup = ReplicaSetup(role=replica, shape=size, models=place.models, prompts=prompts)
        log = place.logs / f"replica-{replica}.log"
        answers, end = live(setup, log, settings, report_stage, bound_s=_BOUND_S)
        found[replica] = {answer.prompt: answer for answer in answers}, end
    rows = compare(prompts_of(size), *(answers for answers, _ in found.values()))
    end, notices = found["B"][1], list[str]()
    if not all(row.complete for row in rows):
        notices.append(f"B loaded less than A should have saved; see the logs in {place.logs}")
    return DemoReport(
        engine=end.engine,
        device=end.device,
        rows=rows,
        load_failures=found["A"][1].load_failures + end.load_failures,
        stored=count(),
        notices=tuple(notices),
    )


def compare(
    prompts: Sequence[ReplicaPrompt], recomputed: Answers, first: Answers, second: Answers
) -> tuple[DemoRow, ...]:
    """Return one row per prompt from the replicas' answers."""
    rows = []
    for prompt in prompts:
        by_replica = [given.get(prompt.name) for given in (recomputed, first, second)]
        alone, saving, loading = by_replica
        assert alone is not None
        assert alone.served_tokens == 0
        assert loading is not None
        rows.append(
            DemoRow(
                prompt=prompt.name,
                prompt_tokens=prompt.length,
                served_tokens=loading.served_tokens,
                recompute_s=alone.first_token_s,
                first_s=None if saving is None else saving.first_token_s,
                second_s=loading.first_token_s,
                identical=len({answer.tokens for answer in by_replica if answer is not None}) == 1,
                speed_up=alone.first_token_s / loading.first_token_s,
            )
        )
    return tuple(rows)
