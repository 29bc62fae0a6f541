"""Stores that are broken, gone or stuck, at the start or while replicas run: they serve on."""

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, PATIENT, SAVED, SharedStore, one_by_one
from tests.engine.harness import Replica, ReplicaFailed, run_replicas
from tests.engine.job import (
    Call,
    Generate,
    Job,
    ResetPrefixCache,
    Result,
    Settle,
    Step,
    Touch,
    WaitFor,
)
from tests.engine.prompts import prompt_of

MODES = ("async", "layerwise")
CHUNKS = 5
WHOLE, BROKEN, UNSAVED, GONE, STUCK = (prompt_of(CHUNKS * CHUNK + 9, seed=i) for i in range(5))
TRIED = prompt_of(CHUNK + 9, seed=5)
"""Shows that the store is back: one load, and one save, are let through to find that out."""
TRIED_TOO = prompt_of(CHUNK + 9, seed=6)
STORED = (WHOLE, BROKEN, GONE, TRIED)
FAR_PORT = 9
"""``discard``: nobody listens there on a machine that runs tests."""

STUCK_S = 15
"""After which a load gives up; on a busy machine one that is not stuck takes a second or two."""
MEANWHILE_S = 600.0
SECRET = "open-sesame"


def changing_store(folder: Path) -> tuple[Step, ...]:
    """What a replica does while ``_change`` changes the store under it."""

    def meanwhile(event: str) -> tuple[Step, ...]:
        return (
            Touch(path=folder / f"{event}.please"),
            WaitFor(path=folder / f"{event}.done"),
        )

    gate = folder / "gate"
    return (
        *one_by_one([WHOLE]),
        *meanwhile("break"),
        *one_by_one([BROKEN, UNSAVED]),
        *meanwhile("mend"),
        *one_by_one([TRIED, TRIED_TOO, BROKEN, UNSAVED, UNSAVED]),
        *meanwhile("remove"),
        *one_by_one([*[GONE] * (1 + CHUNKS), STUCK]),
        Call(function="tests.engine.fleet:hold_gets", arguments={"gate": str(gate)}),
        Generate(prompts=(STUCK,)),
        Touch(path=gate),
        SAVED,
        Settle(),
        ResetPrefixCache(),
        Generate(prompts=(STUCK,)),
    )


def _change(store: SharedStore, folder: Path) -> None:
    """Break, mend and remove the store when the replica asks."""
    aside = folder / "aside"
    for event in ("break", "mend", "remove"):
        deadline = time.monotonic() + MEANWHILE_S
        while not (folder / f"{event}.please").exists():
            assert time.monotonic() < deadline, f"the replica never came to {event}"
            time.sleep(0.02)
        if event == "break":
            store.bulk.rename(aside)
            store.bulk.symlink_to(store.bulk)  # every call fails, whatever the user may do
        elif event == "mend":
            store.bulk.unlink()
            aside.rename(store.bulk)
            time.sleep(0.3)  # the breaker's pause, and that of saves
        else:
            shutil.rmtree(store.bulk)
        (folder / f"{event}.done").touch()


@scenario
def store_changes(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    for name in ("gate", "break.done", "mend.done", "remove.done"):
        (folder / name).touch()
    steps = changing_store(folder)
    alone_steps = tuple(s for s in steps if not isinstance(s, Call))
    alone, _ = run_replicas([Job(steps=alone_steps), store.job(*one_by_one(STORED))], folder)
    values: Values = {"alone": alone}
    with ExitStack() as stack:
        replicas = {}
        for mode in MODES:
            place = folder / mode
            place.mkdir()
            copy = store.copy(place / "store")
            job = copy.job(
                *changing_store(place),
                load_mode=mode,
                load_deadline_ms=STUCK_S * 1000,
                breaker_reset_ms=100,
                breaker_reset_max_ms=100,
            )
            replicas[mode] = (copy, place, stack.enter_context(Replica(job, place)))
        for copy, place, _ in replicas.values():
            _change(copy, place)
        values |= {mode: replica.wait() for mode, (_, _, replica) in replicas.items()}
    return values


def outcome(mode: str) -> dict[str, int | None]:
    """Cached tokens of each prompt, by what had happened to the store."""
    names = (
        "whole",
        "broken",
        "broken, unsaved",
        "tried",
        "tried, unsaved",
        "mended",
        "mended, unsaved",
        "mended, unsaved, again",
        "removed",
        *(f"removed, {again} times again" for again in range(1, CHUNKS + 1)),
        "to be stuck",
        "stuck",
        "no longer stuck",
    )
    return dict(zip(names, store_changes()[mode].cached, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_no_state_of_the_store_changes_a_token_or_ends_a_request(mode: str) -> None:
    run: Result = store_changes()[mode]
    assert run.tokens == store_changes()["alone"].tokens
    assert {o.finish_reason for outputs in run.outputs for o in outputs} == {"length"}


@pytest.mark.parametrize("mode", MODES)
def test_a_store_that_was_broken_for_a_while_is_used_again(mode: str) -> None:
    cached = outcome(mode)
    assert cached["whole"] == cached["mended"] == CHUNKS * CHUNK
    assert cached["broken, unsaved"] == cached["mended, unsaved"] == 0
    assert cached["mended, unsaved, again"] == CHUNKS * CHUNK


@pytest.mark.parametrize("mode", MODES)
def test_each_load_that_misses_something_removed_has_at_least_its_first_chunk_saved_again(
    mode: str,
) -> None:
    """The first miss ends a load. How many more chunks it has missed by then is a race."""
    found = [outcome(mode)[f"removed, {again} times again"] for again in range(1, CHUNKS + 1)]
    assert all(cached >= (k + 1) * CHUNK for k, cached in enumerate(map(int, found)))
    assert store_changes()[mode].metrics["vllm:objkv_load_ghosts"] >= 1


@pytest.mark.parametrize("mode", MODES)
def test_a_store_that_does_not_answer_costs_the_deadline_and_no_more(mode: str) -> None:
    run: Result = store_changes()[mode]
    (stuck,) = run.outputs[-2]
    assert STUCK_S <= stuck.seconds < 10 * STUCK_S
    assert outcome(mode)["no longer stuck"] == CHUNKS * CHUNK


@pytest.mark.parametrize("mode", MODES)
def test_the_log_tells_the_changes_not_every_failure(mode: str) -> None:
    lines = [w.message for w in store_changes()[mode].warnings if w.logger.startswith("objkv")]
    for what in ("loads", "saves"):
        assert len([line for line in lines if f"{what} failing" in line]) == 1
        assert len([line for line in lines if f"{what} working again" in line]) == 1


@scenario
def unreachable_at_start(folder: Path) -> Values:
    """Nobody listens where the stores should be; or a file that is no index stands there."""
    bulk: dict[str, Any] = {
        "bulk_url": "s3://chunks/fleet",
        "s3_endpoint_url": f"http://127.0.0.1:{FAR_PORT}",
    }
    index: dict[str, Any] = {"index_url": f"redis://127.0.0.1:{FAR_PORT}/0"}
    # In the environment, because vLLM prints the settings that it is given.
    secrets = {
        "OBJKV_S3_ACCESS_KEY_ID": "somebody",
        "OBJKV_S3_SECRET_ACCESS_KEY": SECRET,
        "OBJKV_REDIS_PASSWORD": SECRET,
    }
    store = SharedStore(folder / "store")
    garbage = SharedStore(folder / "garbage")
    garbage.folder.mkdir()
    garbage.index_file.write_text("not a database " * 1000)
    steps = one_by_one([WHOLE, WHOLE])
    jobs = {
        "alone": Job(steps=steps),
        "degraded": store.job(*steps, **bulk, **index, drain_deadline_ms=3_000),
        "strict bulk": store.job(*steps, **bulk, at_start="strict"),
        "strict index": store.job(*steps, **index, at_start="strict"),
        "no index": garbage.job(*steps),
    }
    return {
        name: _result_or_failure(job.model_copy(update={"env": secrets}), folder / name)
        for name, job in jobs.items()
    }


def _result_or_failure(job: Job, folder: Path) -> Result | str:
    with Replica(job, folder) as replica:
        try:
            return replica.wait()
        except ReplicaFailed as failure:
            return str(failure)


def test_a_replica_without_its_stores_serves_as_if_alone_and_says_so() -> None:
    run, alone = (unreachable_at_start()[name] for name in ("degraded", "alone"))
    assert run.tokens == alone.tokens
    assert run.cached == [0, 0]
    lines = [w.message for w in run.warnings if "unreachable at start" in w.message]
    assert len(lines) == 4  # scheduler and worker, bulk store and index
    assert any("s3://chunks/fleet" in line for line in lines)
    assert any(f"redis://127.0.0.1:{FAR_PORT}/0" in line for line in lines)
    assert SECRET not in run.log


def test_without_its_stores_a_replica_makes_nobody_wait() -> None:
    run, alone = (unreachable_at_start()[name] for name in ("degraded", "alone"))
    for slow, fast in zip(run.outputs, alone.outputs, strict=True):
        assert slow[0].seconds < fast[0].seconds + PATIENT["lookup_deadline_ms"] / 1000 / 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("strict bulk", "s3://chunks"),
        ("strict index", f"127.0.0.1:{FAR_PORT}"),
        ("no index", "index.sqlite"),
    ],
)
def test_a_replica_that_refuses_to_start_names_the_place(name: str, told: str) -> None:
    failure = unreachable_at_start()[name]
    assert isinstance(failure, str)
    assert "exit status 1" in failure
    last = [line for line in failure.splitlines() if line.strip()][-1]
    assert "objkv.errors." in last
    assert told in last
    assert SECRET not in failure
