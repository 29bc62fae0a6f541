"""Some rows of the matrix in real vLLM engines, each in one mode: one replica a row.

What it is asked and what is asserted is what ``test_matrix`` asks and asserts.
"""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fleet import CHUNK, CONNECTOR, NUMBERS_TOLD, PATIENT, SAVED
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, Prompt, ResetPrefixCache, Result, Settle, Step
from tests.engine.prompts import prompt_of
from tests.faults.agents import AgentPlace
from tests.faults.places import Clock, Place, Servers, running_servers
from tests.faults.rows import BY_NAME, VERBS, Row
from tests.faults.seen import Seen
from tests.faults.test_matrix import OWN_ENGINE
from tests.support.servers.listener import Listener

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]

CASES = {
    "s3-killed": "async",
    "s3-stalled": "layerwise",
    "s3-flipped": "layerwise",
    "s3-404": "async",
    "redis-killed": "layerwise",
    "redis-stalled": "async",
    "redis-wiped": "async",
    "agent-killed": "async",
    "agent-frozen": "layerwise",
    "agent-store-flipped": "layerwise",
}
"""The rows, and the mode of each."""
CHUNKS = 3
FOUND, LOADED, NEW, OTHER = (prompt_of(CHUNKS * CHUNK + 9, seed=70 + i) for i in range(4))
SHORT = prompt_of(CHUNKS * CHUNK + 9, seed=74, max_tokens=1)
"""Its answer does not count as one."""
ROUNDS = CHUNKS + 1
"""Each request finds out of one chunk at least that it is gone."""
IMPATIENT: dict[str, Any] = {
    "chunk_tokens": CHUNK,
    "hot_save_bytes_max": 1 << 20,
    "breaker_failures": 1,
    "breaker_reset_ms": 50,
    "breaker_reset_max_ms": 50,
    "load_deadline_ms": 60_000,
    "step_load_deadline_ms": 60_000,
}
STALLED: dict[str, dict[str, Any]] = {
    "s3-stalled": {"load_deadline_ms": 8_000, "step_load_deadline_ms": 8_000},
    "redis-stalled": {"lookup_deadline_ms": 2_000},
}
IN_PAUSES = Call(function="tests.faults.inside:pause")
NOTED = Call(function="tests.faults.inside:note")
FORGOTTEN = Call(function="tests.faults.inside:forget")
CLEAN: tuple[Step, ...] = (SAVED, Settle(), ResetPrefixCache(), FORGOTTEN, IN_PAUSES)


@pytest.fixture(scope="module")
def hands() -> Iterator[Executor]:
    """Does what replicas ask for: a server dies with the thread that started it."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with running_servers(tmp_path_factory.mktemp("fleet"), Clock()) as servers:
        yield servers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """The tokens of the prompts without a connector."""
    steps = tuple(Generate(prompts=(prompt,)) for prompt in (FOUND, LOADED, NEW))
    return run_replica(Job(steps=steps), tmp_path_factory.mktemp("alone")).tokens


class Control(Listener):
    """Does in this process what a replica asks for."""

    def __init__(self, words: dict[str, Callable[[], None]], hands: Executor) -> None:
        self._words, self._hands = words, hands
        super().__init__()

    def serve(self, connection: socket.socket) -> None:
        """One word, one answer."""
        word = connection.makefile().readline().strip()
        try:
            self._hands.submit(self._words[word]).result()
        except Exception as exc:  # the replica's step fails with it
            connection.sendall(f"{exc!r}\n".encode())
        else:
            connection.sendall(b"done\n")


class _Row:
    """The steps of one replica, and what its answers mean."""

    def __init__(self, row: Row, place: Place) -> None:
        self._row, self._place = row, place
        self._undo: Callable[[], None] = lambda: None
        self._asked = {"inject": 0, "mend": 0}
        self.asked: list[int] = []
        """Requests to the end that fails, per fault."""
        self.elsewhere: list[dict[str, float]] = []
        """What a node agent counted during each fault."""

    def control(self, hands: Executor) -> Control:
        """What the replica tells."""
        return Control(
            {
                "prepare": lambda: self._place.prepare(self._row.name),
                "settle": self._place.settle,
                "empty": self._empty,
                "inject": self._inject,
                "mend": self._mend,
            },
            hands,
        )

    def _empty(self) -> None:
        assert isinstance(self._place, AgentPlace)
        self._place.empty()

    def _inject(self) -> None:
        self._numbers = self._place.numbers()
        self.elsewhere.append({})
        self._undo = self._place.inject(self._row.name)
        self._before = self._place.asked()

    def _mend(self) -> None:
        self.asked.append(self._place.asked() - self._before)
        now = self._place.numbers().items()
        counted = {name: value - self._numbers.get(name, 0) for name, value in now}
        self.elsewhere[-1] = self.elsewhere[-1] or counted
        self._undo()
        self._undo = lambda: None

    def steps(self, port: int) -> tuple[Step, ...]:
        """Lookup, load, save, and the time after."""

        def tell(word: str, function: str = "tell") -> Call:
            arguments = {"control": port, "word": word}
            return Call(function=f"tests.faults.inside:{function}", arguments=arguments)

        clean = CLEAN
        if self._row.world == "agent":
            attach = Call(function="tests.faults.inside:attach")
            clean = (SAVED, tell("settle"), *CLEAN, attach)

        def healthy(prompt: Prompt, *more: Step) -> tuple[Step, ...]:
            """Stored, and loaded once, so that nobody is left alone."""
            run = (Generate(prompts=(prompt,)), *clean)
            return (tell("prepare"), *run, *run, *more, NUMBERS_TOLD, NOTED)

        ended = (NUMBERS_TOLD, NOTED)
        disarm = Call(function="tests.faults.inside:disarm")
        idle = Call(function="tests.engine.fleet:end_loads")
        lookup = (tell("inject"), tell("mend", "at_load"), Generate(prompts=(FOUND,)))
        load = (tell("inject", "at_load"), Generate(prompts=(LOADED,)))
        settled = (tell("settle"),) if self._row.world == "agent" else ()
        save = (tell("inject"), Generate(prompts=(NEW,)), SAVED, *settled)
        # All parts have found the new agent when a prompt was looked up.
        found = (tell("empty"), *clean, Generate(prompts=(SHORT,)), *clean)
        emptied = found if self._row.is_fetched else ()
        # A save that works, after which it is told anew that saves fail.
        works = (Generate(prompts=(OTHER,)), *clean)
        again = (Generate(prompts=(NEW,)), *clean, *ended)
        return (
            Call(function="tests.faults.inside:begin"),
            *(*healthy(FOUND), *lookup, disarm, *ended, tell("mend"), *clean),
            *(*healthy(LOADED, *emptied), *load, idle, *ended, tell("mend"), *clean),
            *(*works, tell("prepare"), NUMBERS_TOLD, NOTED, *save, *ended, tell("mend"), *clean),
            *(again * (ROUNDS + 1)),
        )


def _run(fleet: Servers, hands: Executor, row: Row, mode: str, folder: Path) -> tuple[_Row, Result]:
    place: Place
    if row.world == "agent":
        place = AgentPlace(fleet, arena_bytes=64 << 20)
    else:
        place = Place(fleet, row.world, direct=OWN_ENGINE.get(row.name, False))
    with closing(fleet.redis.client()) as client:
        client.flushall()  # all rows ask for the same prompts
    told = _Row(row, place)
    settings = PATIENT | place.settings | IMPATIENT | {"load_mode": mode}
    settings |= STALLED.get(row.name, {})
    connector = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    try:
        with told.control(hands) as control:
            job = Job(steps=told.steps(control.address[1]), connector=connector)
            return told, run_replica(job, folder)
    finally:
        place.close()


def _judged(
    row: Row, told: _Row, run: Result, alone: list[tuple[int, ...]]
) -> tuple[dict[str, Seen], bool]:
    """What was seen of each verb, and whether all was well afterwards."""
    notes = [answer for answer in run.answers if isinstance(answer, dict)]
    outputs = [o for (o,) in run.outputs if len(o.tokens) > 1]
    lookup, load, save, *after = (outputs[i] for i in (2, 5, *range(7, len(outputs))))
    _, at_lookup, _, at_load, _, at_save, *at_after = notes
    # What was planned to be loaded within the step counts as cached, also where that failed.
    stored = [
        output.cached_tokens == CHUNKS * CHUNK and not note["counted"].get("load_failures")
        for output, note in zip(after, at_after, strict=True)
    ]
    failed = at_load["counted"].get("load_failures", 0)
    found = {
        "lookup": "hit" if at_lookup["fired"] else "miss",
        "load": "hit" if at_load["fired"] and not failed else "miss",
        "save": "saved" if stored[0] else "drop",
    }
    seen = {}
    for verb, output, note, tokens in (
        ("lookup", lookup, at_lookup, alone[0]),
        ("load", load, at_load, alone[1]),
        ("save", save, at_save, alone[2]),
    ):
        seen[verb] = Seen(
            outcome=found[verb],
            right=output.tokens == tokens and output.finish_reason == "length",
            counted=note["counted"],
            lines=note["lines"],
            ended=True,
        )
    if told.asked:
        seen["lookup"].asked = told.asked[0]
    for verb, counted in zip(("lookup", "load", "save"), told.elsewhere, strict=False):
        seen[verb].counted |= counted
    assert at_load["fired"]
    return seen, stored[-1]


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_a_miss(
    fleet: Servers,
    hands: Executor,
    alone: list[tuple[int, ...]],
    tmp_path: Path,
    name: str,
) -> None:
    row = BY_NAME[name]
    seen, works = _judged(row, *_run(fleet, hands, row, CASES[name], tmp_path), alone)
    for verb in VERBS:
        seen[verb].check(row.cell(verb))
    assert works, "what was lost is not found again"
