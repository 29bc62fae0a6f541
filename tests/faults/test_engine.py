"""Some faults of the matrix in real vLLM engines, each in one mode: one replica a row.

The fault is there from before a stored prompt and a new one arrive until both were computed.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from objkv.cache import chunks
from objkv.net.breaker import Patience
from tests.engine.fleet import CHUNK, CONNECTOR, NUMBERS_TOLD, PATIENT, SAVED
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, Prompt, ResetPrefixCache, Result, Settle, Step
from tests.engine.prompts import prompt_of
from tests.faults.agents import AgentPlace
from tests.faults.places import Clock, Place, Servers, Undo, running_servers
from tests.faults.rows import BY_NAME, Row
from tests.faults.seen import UNEXPECTED, Lines
from tests.faults.test_matrix import OWN_ENGINE
from tests.support.served import ServedAgent
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
}
"""The rows, and the mode of each."""
CHUNKS = 3
FOUND, NEW = (prompt_of(CHUNKS * CHUNK + 9, seed=70 + i) for i in range(2))
ROUNDS = CHUNKS + 2
"""Each request finds out of one chunk at least that it is gone."""
IMPATIENT: dict[str, Any] = {
    "chunk_tokens": CHUNK,
    "load_deadline_ms": 60_000,
    "step_load_deadline_ms": 60_000,
}
NOWHERE = {"bulk_url": "file:///nowhere/chunks", "index_url": "sqlite:///nowhere/index"}


def _inside(function: str, **arguments: Any) -> Call:
    return Call(function=f"tests.faults.inside:{function}", arguments=arguments)


@pytest.fixture(scope="module")
def hands() -> Iterator[Executor]:
    """Does what replicas ask for: a server dies with the thread that started it."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "KEEP_S", 0.0)
        hasty = partial(Patience, failures=1, reset_s=0.05, reset_max_s=0.05)
        patch.setattr("objkv.assembly.backends.Patience", hasty)
        patch.setattr("objkv.assembly.agent.LOOKUP_TTL_S", 0.0)
        with running_servers(tmp_path_factory.mktemp("fleet"), Clock()) as servers:
            yield servers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """The tokens of the prompts without a connector."""
    steps = tuple(Generate(prompts=(prompt,)) for prompt in (FOUND, NEW))
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


def _steps(port: int) -> tuple[Step, ...]:
    def tell(word: str) -> Call:
        return _inside("tell", control=port, word=word)

    clean = (
        *(SAVED, tell("settle"), Settle(), ResetPrefixCache()),
        *(tell("forget"), _inside("pause"), _inside("attach")),
    )

    def run(prompt: Prompt) -> tuple[Step, ...]:
        return (Generate(prompts=(prompt,)), *clean)

    return (
        *(_inside("begin"), *run(FOUND), *run(FOUND)),
        *(tell("inject"), Generate(prompts=(FOUND,)), Generate(prompts=(NEW,))),
        *(SAVED, tell("settle"), tell("mend")),
        *(*clean, *((*run(FOUND), *run(NEW)) * ROUNDS), NUMBERS_TOLD),
    )


def _run(fleet: Servers, hands: Executor, row: Row, mode: str, folder: Path) -> Result:
    undo: list[Undo] = []
    words: dict[str, Callable[[], None]] = {
        "inject": lambda: undo.append(place.inject(row.name)),
        "mend": lambda: undo.pop()(),
    }
    with closing(fleet.redis.client()) as client:
        client.flushall()  # all rows ask for the same prompts
    settings = PATIENT | IMPATIENT | row.settings
    with ExitStack() as stack:
        place: Place
        if row.world == "agent":
            place = stack.enter_context(closing(AgentPlace(fleet, arena_bytes=64 << 20)))
            words |= {"settle": place.settle, "forget": lambda: None}
            url = place.agent.url
        else:
            place = Place(fleet, row.world, direct=OWN_ENGINE.get(row.name, False))
            stack.callback(place.close)
            agent = ServedAgent(settings | {"hot_save_bytes_max": 1 << 20} | place.settings)
            stack.callback(agent.close)
            words |= {"settle": agent.settle, "forget": agent.forget}
            url = agent.url
        settings |= NOWHERE | {"load_mode": mode, "agent": url}
        connector = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
        connector["kv_connector_extra_config"] = settings
        control = stack.enter_context(Control(words, hands))
        return run_replica(Job(steps=_steps(control.address[1]), connector=connector), folder)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_a_miss(
    fleet: Servers, hands: Executor, alone: list[tuple[int, ...]], tmp_path: Path, name: str
) -> None:
    row = BY_NAME[name]
    of_agent = Lines()
    logging.getLogger("objkv").addHandler(of_agent)
    try:
        run = _run(fleet, hands, row, CASES[name], tmp_path)
    finally:
        logging.getLogger("objkv").removeHandler(of_agent)
    outputs = [output for (output,) in run.outputs if len(output.tokens) > 1]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert [output.tokens for output in outputs] == alone[:1] * 2 + alone * (ROUNDS + 1)
    cached = [output.cached_tokens for output in outputs]
    assert cached[:2] == [0, CHUNKS * CHUNK]
    assert cached[-2:] == [CHUNKS * CHUNK] * 2, "what was lost is not found again"
    failed = row.lookup if row.lookup.outcome == "miss" else row.load
    assert failed.outcome == "miss"
    assert not failed.counted or run.metrics[f"vllm:objkv_{failed.counted}"] >= 1
    told = [line.message for line in run.warnings if line.logger.startswith("objkv")]
    told += of_agent.lines
    assert not [line for line in told if any(words in line for words in UNEXPECTED)]
