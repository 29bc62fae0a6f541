"""Warming through servers that talk as vLLM's do, over real sockets, with their faults."""

import os
import random
import signal
import threading
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from objkv.errors import ConfigError, StoreUnavailable
from objkv.ops.warm import run as module
from objkv.ops.warm.endpoint import Endpoint
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.run import Task, TaskQueue, WarmJob, WarmLimits, WarmReport, warm_by
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.ops.warm.fake_vllm import (
    FakeVllm,
    Gate,
    Handler,
    Place,
    dropped,
    of_prompts,
    reset,
    status,
)
from tests.support.samples import CHUNK, IDENTITY, view_of

QUICK = WarmLimits(attempts_max=3, save_s=0.3, gone_s=0.3, pause_s=0.01)
SHARED = tuple(range(100, 100 + 2 * CHUNK))


def tail(number: int, chunks: int = 1) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + chunks * CHUNK))


def prompts_of(*tokens: Sequence[int], **more: str) -> list[WarmPrompt]:
    return [WarmPrompt(f"p{n}", tokens=tuple(one), **more) for n, one in enumerate(tokens)]


@pytest.fixture
def place(bulk: MemoryStore, index: MemoryIndex) -> Place:
    return Place(bulk, index)


class Run:
    """One run of ``warm`` in this process."""

    def __init__(self, place: Place, *servers: FakeVllm, at_once: int = 4) -> None:
        view = view_of(place.bulk, place.index)  # type: ignore[arg-type]
        endpoints = [Endpoint(server.url, at_once=at_once) for server in servers]
        self.job = WarmJob(view, endpoints, limits=QUICK)

    def __call__(self, prompts: Sequence[WarmPrompt], limits: WarmLimits = QUICK) -> WarmReport:
        return warm_by(replace(self.job, limits=limits), prompts, "endpoints")


def test_everything_is_computed_once_and_stored_when_it_is_done(place: Place) -> None:
    prompts = [SHARED + tail(number) for number in range(1, 7)]
    with FakeVllm(place) as server:
        report = Run(place, server)(prompts_of(*prompts))
    assert report.is_complete
    assert (report.warmed, report.saved_chunks, report.failed) == (6, 8, 0)
    assert all(place.stored(prompt) == 3 for prompt in prompts)
    # The first one alone had the shared prefix to compute, and all others found it.
    assert [one.stored_before for one in server.real] == [0, 2, 2, 2, 2, 2]
    assert server.together[1] == (server.real[0].tokens,)


def test_a_prompt_of_another_model_or_an_adapter_is_refused(place: Place) -> None:
    with FakeVllm(place) as server, pytest.raises(ConfigError, match="p0: model lawyer is not"):
        Run(place, server)(prompts_of(SHARED, model="lawyer"))
    assert server.real == []


@pytest.mark.parametrize(
    "fault", [status(500), status(503), status(429, Retry_After="0"), reset, status(502), dropped]
)
def test_one_fault_costs_one_more_request(place: Place, fault: object) -> None:
    with FakeVllm(place, faults=[fault]) as server:  # type: ignore[list-item]
        report = Run(place, server)(prompts_of(SHARED), replace(QUICK, gone_s=20))
    assert report.is_complete
    assert (report.warmed, report.retries, len(server.real)) == (1, 1, 2)


def test_a_prompt_that_always_fails_is_named_and_the_rest_is_done(place: Place) -> None:
    broken = SHARED + tail(1)

    def poison(handler: Handler) -> bool:
        is_it = handler.server.fake.under_way[-1] == broken
        return is_it and handler.answer(500, {"error": {"message": "engine trouble"}})

    with FakeVllm(place) as server:
        server.every = poison
        report = Run(place, server, at_once=1)(prompts_of(broken, SHARED, tail(2)))
    assert (report.warmed, report.failed, report.ending) == (2, 1, "complete")
    assert report.failures[0].name == "p0"
    assert "HTTP 500: engine trouble" in report.failures[0].why
    assert not report.is_complete
    assert sum(one.tokens == broken for one in server.real) == QUICK.attempts_max


def test_a_prompt_that_is_computed_and_never_saved_has_failed(place: Place) -> None:
    with FakeVllm(place) as server:
        server.every = of_prompts(dropped)
        report = Run(place, server, at_once=1)(prompts_of(SHARED))
    assert report.failed == 1
    assert "0 of 2 chunks were stored" in report.failures[0].why
    assert len(server.real) == QUICK.attempts_max
    assert report.endpoints[0].errors == QUICK.attempts_max


def test_a_fleet_that_saves_nothing_ends_it(place: Place) -> None:
    with FakeVllm(place) as server:
        run = Run(place, server)
        server.every = of_prompts(dropped)
        report = run(prompts_of(*map(tail, range(1, 9))), replace(QUICK, attempts_max=100))
    assert (report.ending, report.failed, report.left) == ("unreachable", 0, 8)
    assert "saved nothing here" in report.why
    assert report.endpoints[0].errors >= 4


def test_an_endpoint_that_dies_is_left_to_the_others(place: Place) -> None:
    prompts = [tail(number, 2) for number in range(1, 21)]
    with FakeVllm(place) as one, FakeVllm(place) as two:
        began = threading.Event()

        def die(handler: Handler) -> bool:
            if len(one.real) > 3 and not began.is_set():
                began.set()
                one.end()
            return began.is_set() and reset(handler)

        one.every = die
        report = Run(place, one, two, at_once=2)(
            prompts_of(*prompts), replace(QUICK, attempts_max=10)
        )
    assert report.is_complete
    assert report.warmed == 20
    dead, alive = report.endpoints
    assert dead.errors > 0
    assert alive.answered > dead.answered


def test_when_no_endpoint_answers_any_more_it_ends_and_says_why(place: Place) -> None:
    with FakeVllm(place) as server:

        def die(handler: Handler) -> bool:
            if len(server.real) < 3:
                return False
            server.end()
            return reset(handler)

        server.every = die
        report = Run(place, server, at_once=1)(
            prompts_of(*(tail(number, 2) for number in range(1, 7)))
        )
    assert (report.ending, report.warmed, report.left) == ("unreachable", 2, 4)
    assert report.why.startswith(f"no endpoint answers any more: {server.url}")


def test_when_the_index_fails_it_ends_and_says_why(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise StoreUnavailable("the index is gone")

    def fail(handler: Handler) -> bool:
        monkeypatch.setattr(module, "look_up", gone)
        return False

    with FakeVllm(place) as server:
        server.every = of_prompts(fail)
        report = Run(place, server)(prompts_of(SHARED, tail(1)))
    assert (report.ending, report.why) == ("unreachable", "the index is gone")
    assert report.left == 2


def test_without_any_endpoint_the_command_cannot_begin(place: Place) -> None:
    with FakeVllm(place) as server:
        server.end()
    with pytest.raises(StoreUnavailable, match=server.url):
        Run(place, server)(prompts_of(SHARED))


def test_an_endpoint_that_saves_elsewhere_is_found_out_before_anything_is_computed(
    place: Place,
) -> None:
    with (
        FakeVllm(place, saves=False) as server,
        pytest.raises(ConfigError, match="saved nothing here within"),
    ):
        Run(place, server)(prompts_of(SHARED))
    assert server.real == []


def test_an_older_namespace_of_the_same_model_is_not_believed(place: Place) -> None:
    """What is stored there helps nobody: the replicas look elsewhere."""
    old = replace(place, identity=replace(IDENTITY, weights="1" * 16))
    old.save(SHARED)
    with FakeVllm(place) as server:
        report = Run(place, server)(prompts_of(SHARED))
    assert report.namespace == IDENTITY.namespace()
    assert (report.stored_before, report.warmed) == (0, 1)


def test_endpoints_that_do_not_share_are_told_apart(place: Place) -> None:
    other = replace(place, identity=replace(IDENTITY, tenant="other"))
    with (
        FakeVllm(place) as one,
        FakeVllm(other) as two,
        pytest.raises(ConfigError, match="do not share") as raised,
    ):
        Run(place, one, two)(prompts_of(SHARED))
    assert other.identity.namespace() in str(raised.value)


def test_an_interruption_ends_requests_and_the_next_run_goes_on(place: Place) -> None:
    prompts = prompts_of(*(tail(number, 2) for number in range(1, 9)))
    gate = Gate()
    with FakeVllm(place) as server:

        def hold(handler: Handler) -> bool:
            if len(server.real) <= 3:
                return False
            return gate(handler)

        server.every = hold
        run = Run(place, server, at_once=2)
        is_interrupted = threading.Event()

        def interrupt(report: WarmReport) -> None:
            if report.warmed >= 3 and not is_interrupted.is_set():
                is_interrupted.set()
                os.kill(os.getpid(), signal.SIGINT)

        run.job = replace(run.job, progress=interrupt)
        first = run(prompts, replace(QUICK, save_s=30))
        gate.opened.set()
    assert (first.ending, first.warmed, first.left) == ("interrupted", 3, 5)
    with FakeVllm(place) as server:
        second = Run(place, server)(prompts)
    assert second.is_complete
    assert second.stored_before + second.warmed == 8
    assert second.stored_before >= 3


def names(*letters: str) -> list[bytes]:
    """A prompt's chunks, each named by all before it."""
    return ["".join(letters[: end + 1]).encode() for end in range(len(letters))]


def task_of(hashes: Sequence[bytes]) -> Task:
    return Task("p", array("I"), None, hashes)


def test_no_chunk_is_ever_computed_by_two_and_all_prompts_get_their_turn() -> None:
    source = random.Random(5)
    for _ in range(50):
        lengths = [source.randint(1, 6) for _ in range(40)]
        order = TaskQueue([task_of(names(*source.choices("ab", k=n))) for n in lengths])
        under_way, computed, done = list[Task](), set[bytes](), 0
        while order:
            while (task := order.next()) is not None:
                missing = set(task.hashes[task.stored :])
                if not missing:
                    assert set(task.hashes) <= computed
                    order.end(task, is_stored=True)
                    done += 1
                    continue
                assert computed.isdisjoint(missing)
                assert all(missing.isdisjoint(one.hashes[one.stored :]) for one in under_way)
                under_way.append(task)
            if not under_way:
                break
            task = under_way.pop(source.randrange(len(under_way)))
            end = source.random()
            if end < 0.2:
                order.retry(task)
                continue
            if end < 0.8:
                computed |= set(task.hashes)
            order.end(task, is_stored=end < 0.8)
            done += 1
        assert (done, len(order)) == (40, 0)


def test_a_check_with_an_endpoint_tokenizes_and_computes_nothing(place: Place) -> None:
    place.save(SHARED)
    prompts = [WarmPrompt("text", text=" ".join(map(str, SHARED)))]
    with FakeVllm(place) as server:
        job = replace(Run(place, server).job, identity=IDENTITY)
        report = warm_by(job, [*prompts, *prompts_of(SHARED + tail(1))], "check")
    assert (report.stored_before, report.failed, server.asked) == (1, 1, [])
    assert report.failures[0].why == "2 of 3 chunks are stored"
