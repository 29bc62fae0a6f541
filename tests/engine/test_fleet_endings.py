"""However a replica ends, it leaves no process, no thread and no lease, and what it saved."""

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.engine.endings import (
    END_S,
    EXIT,
    SLOW_SAVES,
    STOPPED,
    EngineTold,
    exit_status,
    kill_session,
    objkv_errors,
    session_processes,
    time_to_end,
)
from tests.engine.fleet import SharedStore
from tests.engine.harness import Replica, run_replica
from tests.engine.job import Call, Generate, Job, Touch, WaitFor
from tests.engine.prompts import prompt_of
from tests.engine.scenario import Values, scenario
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
WAYS = {
    "a script that ends": (EXIT, False),
    "a script that ends, its engine in other processes": (EXIT, True),
    "Ctrl-C": (None, False),
    "Ctrl-C, its engine in other processes": (None, True),
}
PROMPTS = {way: prompt_of(600, seed=seed) for seed, way in enumerate(WAYS)}
LOADED = 512
"""Whole chunks of each prompt."""
ANSWERED_S = 900.0
ENDLESS_S = 3_600.0


@scenario
def all_ways_to_end(folder: Path) -> Values:
    """One prompt each, and then the end, at once. After them, a replica that asks for all."""
    store = SharedStore(folder / "store")
    ends = {}
    for number, (way, (call, processes)) in enumerate(WAYS.items()):
        answered = folder / f"answered-{number}"
        waits = WaitFor(path=folder / "never", seconds_max=ENDLESS_S)
        last = Call(function=call) if call else waits
        before = time_to_end(told=call is None) if processes else SLOW_SAVES
        generate = Generate(prompts=(PROMPTS[way],))
        job = store.job(before, generate, Touch(path=answered), last)
        job = job.model_copy(update={"processes": processes, "fresh": True})
        ends[way] = end_of(job, folder, answered, interrupt=call is None)
        with closing(sqlite3.connect(store.index_file)) as index:
            leases = [name for (name,) in index.execute("SELECT name FROM leases")]
        # Those of payloads that were saved expire.
        ends[way]["leases"] = [name for name in leases if not (store.bulk / name).exists()]
    reader = store.job(Generate(prompts=tuple(PROMPTS.values())), Call(function=STOPPED))
    return {"ends": ends, "reader": run_replica(reader, folder)}


def end_of(job: Job, folder: Path, answered: Path, *, interrupt: bool) -> Values:
    with Replica(job, folder) as replica:
        leader = replica.process.pid
        try:
            wait_until(answered.exists, "the replica's answer", bound_s=ANSWERED_S)
            running = len(session_processes(leader))
            if interrupt:
                os.killpg(leader, signal.SIGINT)  # as a terminal does: to every process
            told, process = EngineTold(replica.log_file), replica.process
            wait_until(lambda: process.poll() is not None or told(), "the end", bound_s=END_S)
            status = exit_status(process, replica.log_file)
        finally:
            kill_session(leader)
        log = replica.log_file.read_text(errors="replace")
    return {"status": status, "running": running, "log": log}


@pytest.mark.parametrize("way", WAYS)
def test_a_replica_that_ends_saves_its_last_prompt_and_leaves_nothing(way: str) -> None:
    end, run = all_ways_to_end()["ends"][way], all_ways_to_end()["reader"]
    assert end["leases"] == []
    assert end["running"] > 1 or not WAYS[way][1]
    assert run.cached[list(WAYS).index(way)] == LOADED
    assert objkv_errors(end["log"]) == []
    if way.startswith("a script"):
        assert not end["status"]  # 0, or None where vLLM hung


def test_an_engine_that_is_shut_down_leaves_no_thread_of_ours() -> None:
    threads = all_ways_to_end()["reader"].answers[-1]
    assert threads["before"]
    assert threads["after"] == []
