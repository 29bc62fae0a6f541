"""Three replicas, one after the other, on an empty store: one computes, one saves, one loads."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from objkv.errors import ConfigError
from objkv.ops.demo.job import EVENT, Answer, Done, Job, Prompt, Size, Stage, prompts_of, warm_up_of
from objkv.ops.demo.report import Row, compare
from objkv.ops.programs import Program

# Where the demo keeps its model, logs and store: one folder, one demo at a time.


@dataclass(frozen=True, slots=True)
class Place:
    """Folders below the user's cache folder."""

    root: Path

    @property
    def models(self) -> Path:
        """Kept from demo to demo."""
        return self.root / "models"

    @property
    def logs(self) -> Path:
        """Of the last demo."""
        return self.root / "logs"

    @property
    def prompts(self) -> Path:
        """Token ids of the last demo's prompts, one file each."""
        return self.root / "prompts"

    @property
    def store(self) -> Path:
        """Chunks and index of the last demo that needed no servers."""
        return self.root / "store"

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables that lead to ``store``."""
        return {
            "OBJKV_BULK_URL": f"file://{self.store / 'chunks'}",
            "OBJKV_INDEX_URL": f"sqlite://{self.store / 'index.sqlite'}",
        }

    def prompt_file(self, prompt: Prompt) -> Path:
        """For ``objkv match --tokens``."""
        return self.prompts / f"{prompt.name.replace(', ', '-').replace(' ', '-')}.json"


@contextmanager
def prepared(place: Place, prompts: tuple[Prompt, ...]) -> Iterator[None]:
    """Empty the place of what the last demo left, but for the model, and keep others out.

    Raises ``ConfigError`` while another demo runs there.
    """
    place.root.mkdir(parents=True, exist_ok=True)
    with (place.root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigError(f"another demo is running in {place.root}: wait for it") from exc
        for folder in (place.logs, place.prompts, place.store):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for prompt in prompts:
            place.prompt_file(prompt).write_text(json.dumps(prompt.tokens))
        yield


Tell = Callable[[str, str], None]
"""``(replica, stage)``; called whenever a stage begins."""
_BOUND_S = 300.0
"""From start to exit of one replica. It takes about 20 s on two free cores."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the replicas showed."""

    engine: str
    device: str
    rows: tuple[Row, ...]
    load_failures: int


@dataclass(frozen=True, slots=True)
class _Life:
    answers: Mapping[str, Answer]
    done: Done


def show_replicas(size: Size, place: Place, tell: Tell) -> Shown:
    """Run all three. Takes about a minute; raises ``ProgramFailed``."""
    prompts = prompts_of(size)
    everything = Job(
        size=size,
        models=place.models,
        connector=False,
        warm_up=warm_up_of(size),
        prompts=prompts,
    )
    first_half = tuple(prompt for prompt in prompts if prompt.asked_before)
    recomputed = _live("replica R (without objkv)", everything, place, tell)
    first = _live(
        "replica A (computes, saves)",
        everything.model_copy(update={"connector": True, "prompts": first_half}),
        place,
        tell,
    )
    second = _live(
        "replica B (loads)", everything.model_copy(update={"connector": True}), place, tell
    )
    return Shown(
        engine=second.done.engine,
        device=second.done.device,
        rows=compare(prompts, recomputed.answers, first.answers, second.answers),
        load_failures=first.done.load_failures + second.done.load_failures,
    )


def _live(name: str, job: Job, place: Place, tell: Tell) -> _Life:
    """One replica, from start to exit."""
    stem = place.logs / "-".join(name.split()[:2])
    job_file = stem.with_suffix(".json")
    job_file.write_text(job.model_dump_json())
    arguments = ("-m", "objkv.connector.programs.demo_replica", str(job_file))
    settings = place.settings if job.connector else {}
    answers: dict[str, Answer] = {}
    done: Done | None = None
    with Program(name, arguments, stem.with_suffix(".log"), settings) as program:
        for line in program.lines(bound_s=_BOUND_S):
            event = EVENT.validate_json(line)
            match event:
                case Stage():
                    tell(name, event.text)
                case Answer():
                    answers[event.prompt] = event
                case Done():
                    done = event
        if done is None:
            raise program.failed("ended without saying how it went")
    return _Life(answers, done)
