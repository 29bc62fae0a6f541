"""However a replica ends, it leaves no process, no thread and no lease, and what it saved."""

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.engine import endings
from tests.engine.fleet import SharedStore, touch
from tests.engine.harness import Replica, run_replica
from tests.engine.job import call, generate, prompt_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
ASK = generate(prompt_of(600))
LOADED = 512
ANSWERED_S = 900.0


def wait_for_ever(_llm: Any) -> None:
    time.sleep(3_600)


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["a script that ends", "Ctrl-C"])
@pytest.mark.parametrize("processes", [False, True], ids=["one process", "several"])
def test_a_replica_that_ends_saves_its_last_prompt_and_leaves_nothing(
    folder: Path, *, is_interrupted: bool, processes: bool
) -> None:
    """One prompt, and then the end, at once. After it, a replica that asks for the same."""
    store, answered = SharedStore(folder / "store"), folder / "answered"
    before = call(endings.slow_saves, seconds=0.5)
    if processes:
        before = call(endings.give_time_to_end, told=is_interrupted)
    last = call(wait_for_ever if is_interrupted else endings.end_of_script)
    job = store.job(before, ASK, call(touch, path=answered), last)
    job = job.model_copy(update={"processes": processes, "fresh": True})
    with Replica(job, folder) as replica:
        process, leader = replica.process, replica.process.pid
        try:
            wait_until(answered.exists, "the replica's answer", bound_s=ANSWERED_S)
            running = len(endings.session_processes(leader))
            if is_interrupted:
                os.killpg(leader, signal.SIGINT)  # as a terminal does: to every process
            told = endings.EngineTold(replica.log_file)
            wait_until(
                lambda: process.poll() is not None or told(), "the end", bound_s=endings.END_S
            )
            status = endings.exit_status(process, replica.log_file)
        finally:
            endings.kill_session(leader)
    with closing(sqlite3.connect(store.index_file)) as index:
        leases = [name for (name,) in index.execute("SELECT name FROM leases")]
    # Those of payloads that were saved expire.
    assert [name for name in leases if not (store.bulk / name).exists()] == []
    assert running > 1 or not processes
    assert endings.objkv_errors(replica.log_file.read_text(errors="replace")) == []
    assert is_interrupted or not status  # 0, or None where vLLM hung

    stop = call(endings.objkv_threads_after_shutdown)
    reader = run_replica(store.job(ASK, stop), folder)
    assert reader.cached == [LOADED]
    assert reader.answers[-1]["before"]
    assert reader.answers[-1]["after"] == []
