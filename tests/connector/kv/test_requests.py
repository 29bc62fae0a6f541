"""What is followed of a request: its hashes, computed in the background, and its chunks."""

import hashlib
from dataclasses import replace
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from objkv.connector.kv.requests import (
    NO_LIMITS,
    LimitReader,
    RequestHashes,
    RequestTracker,
    TrackedRequest,
)
from objkv.connector.kv.scheduler import SchedulerSide
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.telemetry import MemoryRecorder
from tests.contracts.memory_index import MemoryIndex
from tests.support.sides import (
    GEOMETRY,
    IDENTITY,
    RECORD,
    SIZE,
    Jobs,
    ask,
    publish_prompt,
    request,
    scheduler_side,
    step,
)
from tests.support.waiting import wait_until

NAMESPACE = IDENTITY.namespace()
TOKENS = list(range(100 * SIZE + 5))
WHOLE = prefix_hashes(NAMESPACE, TOKENS, SIZE)


def hashes_of(tokens: list[int], **more: Any) -> RequestHashes:
    return RequestHashes(request(tokens, **more), NAMESPACE, None, SIZE)


def image(name: str | None, offset: int = 0) -> Any:
    place = SimpleNamespace(offset=offset, length=7)
    return SimpleNamespace(identifier=name, mm_position=place)


def test_prompts_that_differ_in_more_than_tokens_share_nothing() -> None:
    cat, dog = image("cat"), image("dog")
    beside = ({}, {"cache_salt": "s"}, {"mm_features": [cat]}, {"mm_features": [dog]})
    alike = [hashes_of(TOKENS, **more) for more in beside]
    alike.append(RequestHashes(request(TOKENS), NAMESPACE, b"adapter", SIZE))
    for place in (("cat", SIZE + 4), ("dog", SIZE + 4), ("cat", SIZE + 5)):
        alike.append(hashes_of(TOKENS, mm_features=[image(*place)]))
        assert alike[-1][0:1] == WHOLE[:1], "nothing before an image differs"
    assert len({name for hashes in alike for name in hashes[1:4]}) == 3 * len(alike)
    assert len({hashes[0:1][0] for hashes in alike[:5]}) == 5


def test_what_becomes_of_a_request_does_not_change_its_hashes() -> None:
    """They are computed later, on another thread."""
    one = request(TOKENS, cache_salt="s")
    hashes = RequestHashes(one, NAMESPACE, None, SIZE)
    one.cache_salt = None
    one.mm_features.append(image("cat"))
    assert hashes[0:3] == hashes_of(TOKENS, cache_salt="s")[0:3]


def test_the_scheduler_is_told_of_what_others_computed_and_has_the_rest_computed() -> None:
    hashes, jobs = hashes_of(TOKENS), Jobs()
    jobs.full = True
    assert hashes.ready(80, jobs.submit) == 0
    jobs.full = False
    assert hashes.ready(80, jobs.submit) == 0
    assert hashes.ready(80, jobs.submit) == 0
    assert len(jobs) == 1
    jobs.run()
    assert hashes.ready(80, jobs.submit) == 80
    assert [hashes.chain.hash(i) for i in range(100)] == WHOLE
    assert hashes.chain.parent(0) == root_hash(NAMESPACE)
    assert hashes.chain.token_digest(1) == token_digest(TOKENS[SIZE : 2 * SIZE])


def test_a_token_that_cannot_be_hashed_ends_the_request_s_hashes_and_raises_nothing() -> None:
    """What one prompt raises on the scheduler's thread costs all others their saves."""
    tokens = TOKENS[: 2 * SIZE]
    hashes, jobs = hashes_of(tokens), Jobs()
    hashes.ready(2, jobs.submit)
    jobs.run()
    tokens += [-1] * SIZE
    assert hashes.ready(3, jobs.submit) == 2
    assert hashes.failed
    assert hashes.ready(3, jobs.submit) == 2
    assert not jobs


def test_the_next_chunk_of_a_growing_request_needs_no_other_thread() -> None:
    tokens = TOKENS[: 10 * SIZE]
    hashes, jobs = hashes_of(tokens), Jobs()
    assert hashes[0:10] == WHOLE[:10]
    tokens += TOKENS[10 * SIZE : 11 * SIZE]
    assert hashes.ready(11, jobs.submit) == 11
    assert hashes.chain.hash(10) == WHOLE[10]
    assert not jobs
    tokens += TOKENS[11 * SIZE :]
    assert hashes.ready(100, jobs.submit) == 11
    assert len(jobs) == 1


def test_what_cannot_be_computed_is_not_tried_again() -> None:
    hashes, jobs = hashes_of(TOKENS, mm_features=[image(None)]), Jobs()
    hashes.ready(1, jobs.submit)
    with pytest.raises(AttributeError):
        jobs.run()
    assert hashes.failed
    assert hashes.ready(1, jobs.submit) == 0
    assert not jobs


@pytest.fixture
def tracker() -> RequestTracker:
    """Of a replica whose stores have two chunks of ``TOKENS``."""
    publish_prompt(index := MemoryIndex(), TOKENS[: 2 * SIZE])
    return scheduler_side(index).requests


def looked_up(tracker: RequestTracker, one: Any) -> TrackedRequest:
    """A request whose lookup has ended."""
    tracked = tracker.add(one, NAMESPACE)
    wait_until(lambda: tracker.records(tracked) is not None)
    return tracked


@pytest.mark.parametrize(
    "more", [{}, {"prompt_embeds": torch.zeros(len(TOKENS), 4), "prompt_is_token_ids": None}]
)
def test_nothing_is_hashed_on_the_thread_that_follows_requests(
    tracker: RequestTracker, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    threads, sha256 = set(), hashlib.sha256

    def seen(*args: Any) -> Any:
        threads.add(get_ident())
        return sha256(*args)

    monkeypatch.setattr(hashlib, "sha256", seen)
    tracked = looked_up(tracker, request(TOKENS, **more))
    assert tracker.due(tracked, 100)
    assert threads
    assert get_ident() not in threads


def test_chunks_that_are_stored_are_not_due_and_those_without_hashes_wait(
    tracker: RequestTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs()
    tracked = looked_up(tracker, request(TOKENS[: 2 * SIZE]))
    assert tracker.due(tracked, 2) == []
    tracked.request.all_token_ids += TOKENS[2 * SIZE : 50 * SIZE]
    monkeypatch.setattr(tracker._lookups, "submit", jobs.submit)
    assert tracker.due(tracked, 50) == []
    jobs.run()
    assert tracker.due(tracked, 50) == list(range(2, 50))


def adapter(*, in_place: bool = False) -> Any:
    return SimpleNamespace(lora_path="/nowhere", lora_int_id=1, load_inplace=in_place)


@pytest.mark.parametrize("more", [{"resumable": True}, {"lora_request": adapter(in_place=True)}])
def test_what_may_change_while_it_runs_is_left_alone(
    tracker: RequestTracker, caplog: pytest.LogCaptureFixture, more: dict[str, Any]
) -> None:
    """vLLM takes tokens of a session back and adds images to it; an adapter's file says what it is
    now. Hashes made before would name other KV."""
    caplog.set_level("INFO", "objkv")
    for name in ("a", "b"):
        tracked = tracker.add(request(name=name, **more), NAMESPACE)
        assert (tracked.may_load, tracked.may_save) == (False, False)
        assert tracker.records(tracked) == ()
    told = caplog.text.count("sessions with streaming input are not shared")
    assert told == ("resumable" in more)


def test_a_request_waits_for_an_adapter_no_longer_than_for_a_lookup(
    tracker: RequestTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may hang, or be large."""
    monkeypatch.setattr(tracker._lookups, "submit", lambda _job: True)
    tracked = tracker.add(request(lora_request=adapter()), NAMESPACE)
    assert tracker.records(tracked) is None
    assert tracked.deadline <= tracker._lookups.deadline()
    monkeypatch.setattr(tracker._lookups, "is_late", lambda deadline: deadline == tracked.deadline)
    assert tracker.records(tracked) == ()
    assert tracked.may_save


def test_after_many_drops_a_step_tries_few_chunks_again(tracker: RequestTracker) -> None:
    """Otherwise each step of a long prompt would plan all of them until the last is saved."""
    one = looked_up(tracker, request(TOKENS))
    assert tracker.due(one, 100) == list(range(2, 100))
    one.again.update(range(100))
    tried: list[int] = []
    while some := tracker.due(one, 100):
        assert len(some) < 50
        tried += some
    assert tried == list(range(100))


# What a request's sender asks for is read as vLLM's own connector reads it.


INVALID = [
    {name: 1 if (name, value) == ("objkv_put", True) else value}
    for name in ("max_load_tokens", "max_offload_tokens", "objkv_put")
    for value in (True, -1, 1.5, "5", [5], {})
]


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, "text", 7, *INVALID], ids=str)
def test_what_is_no_limit_is_ignored_and_counted_if_it_was_meant_as_one(params: Any) -> None:
    recorder = MemoryRecorder()
    assert LimitReader(recorder).read(params) == NO_LIMITS
    assert recorder.value("limits_ignored") == (params in INVALID)


def side(stored: int) -> SchedulerSide:
    """A replica whose stores have this many chunks of the prompt of every request."""
    publish_prompt(index := MemoryIndex(), [7] * stored * SIZE)
    return scheduler_side(index, admission="always")


@pytest.mark.parametrize(
    ("asked", "computed", "loaded"),
    [
        ({}, 0, 3 * SIZE),
        ({"max_load_tokens": 2 * SIZE}, 0, 2 * SIZE),
        ({"max_load_tokens": 2 * SIZE - 1}, 0, SIZE),
        ({"max_load_tokens": SIZE}, SIZE, SIZE),
        ({"max_load_tokens": 0}, 0, 0),
    ],
    ids=str,
)
def test_no_more_is_loaded_than_is_allowed(
    asked: dict[str, Any], computed: int, loaded: int
) -> None:
    prompt = request(3 * SIZE + 2, kv_transfer_params=asked)
    assert ask(side(3), prompt, computed)[0] == loaded


@pytest.mark.parametrize(
    ("asked", "saved"),
    [({}, 3), ({"max_offload_tokens": 2 * SIZE + 1}, 2), ({"max_offload_tokens": 0}, 0)],
    ids=str,
)
def test_no_more_is_saved_than_is_allowed(asked: dict[str, Any], saved: int) -> None:
    ask(one := side(0), prompt := request(3 * SIZE, kv_transfer_params=asked))
    one.plan_load(prompt, (), 0)
    plans = one.plan_step(step({"r": 3 * SIZE}, [3, 4, 5, 6, 7, 8])).saves
    assert sum(len(plan.moves) for plan in plans) == saved


def test_what_only_some_nodes_would_hold_back_is_put_at_once() -> None:
    one = scheduler_side(geometry=replace(GEOMETRY, tp_size=2, nodes=2))
    ask(one, prompt := request(2 * SIZE))
    one.plan_load(prompt, (), 0)
    (plan,) = one.plan_step(step({"r": 2 * SIZE}, list(range(1, 9)))).saves
    assert plan.puts


@pytest.mark.parametrize("puts", [False, True])
def test_what_an_agent_holds_back_is_put_for_a_request_that_says_so(puts: bool) -> None:
    unsaved = replace(RECORD, header_checksum="unsaved:" + RECORD.header_checksum)
    publish_prompt(index := MemoryIndex(), [7] * SIZE, unsaved)
    asked: list[tuple[list[bytes], bool]] = []
    one = scheduler_side(
        index,
        admission="always",
        prefetch=lambda _, hashes, order: asked.append((list(hashes), order.puts)) or 1,
    )
    prompt = request(2 * SIZE + 1, kv_transfer_params={"objkv_put": puts})
    assert ask(one, prompt, SIZE)[0] == 0, "vLLM has that chunk"
    one.plan_load(prompt, (), 0)
    prompt.num_computed_tokens = SIZE
    (plan,) = one.plan_step(step({"r": SIZE + 1}, list(range(1, 9)))).saves
    assert plan.puts is puts
    assert [save.move.chunk for save in plan.moves] == [1]
    hashes = prefix_hashes(one.namespace, [7] * 2 * SIZE, SIZE)
    wait_until(lambda: not one.lookups._thread.unfinished)
    assert asked == ([(hashes, True)] if puts else [])
