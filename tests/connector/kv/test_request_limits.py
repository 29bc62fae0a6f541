"""What a request's sender asks for is read as vLLM's own connector reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as vllms
from vllm.v1.kv_offload import base

from objkv.connector.kv.request_limits import NO_LIMITS, LimitReader, RequestLimits
from objkv.connector.kv.scheduler import SchedulerSide
from objkv.index.memory import MemoryIndex
from objkv.telemetry import MemoryRecorder
from tests.support.paged_cache import wait_until
from tests.support.sides import SIZE, publish_prompt, request, scheduler_side, step


def read(params: Any, recorder: MemoryRecorder | None = None, **more: Any) -> RequestLimits:
    request = cast("Any", SimpleNamespace(kv_transfer_params=params, **more))
    return LimitReader("REMOTE", recorder or MemoryRecorder()).read(request)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "text", 7])
def test_a_request_without_limits_has_none(params: Any) -> None:
    assert read(params) is NO_LIMITS


@pytest.mark.parametrize("value", [True, -1, 1.5, "5", [5], {}])
@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
def test_an_invalid_number_is_ignored_and_counted(name: str, value: Any) -> None:
    recorder = MemoryRecorder()
    assert read({name: value}, recorder) == NO_LIMITS
    assert recorder.drain() == {"limits_ignored": 1}


def test_numbers_limit_loads_and_saves() -> None:
    asked = {"max_load_tokens": 0, "max_offload_tokens": 512}
    assert read(asked) == RequestLimits(load_tokens_max=0, save_tokens_max=512)


words = st.sampled_from(("STORAGE", "storage", "CPU", "GPU", "LOCAL", "REMOTE", "remote", 5, None))
tiers = st.fixed_dictionaries({}, optional={"medium": words, "locality": words})


@given(st.one_of(words, st.lists(st.one_of(tiers, words), max_size=3)))
def test_tiers_are_those_that_vllm_would_load_from(listed: Any) -> None:
    expected = True
    if listed is not None:
        allowed = vllms._parse_tier_filter(listed)
        expected = allowed.allows(base.Medium.STORAGE, base.Locality.REMOTE)
    assert read({"kv_load_tiers": listed}).loads is expected


def test_actions_of_hints_are_counted() -> None:
    recorder = MemoryRecorder()
    read(None, recorder, kv_hints=SimpleNamespace(actions=[1, 2]))
    read(None, recorder, kv_hints="strange")
    assert recorder.drain() == {"hints_unused": 2}


@contextmanager
def side(stored: int) -> Iterator[SchedulerSide]:
    """A replica whose stores have this many chunks of the prompt of every request."""
    index = MemoryIndex()
    publish_prompt(index, [7] * stored * SIZE)
    found = scheduler_side(index, admission="always")
    yield found
    found.close()


@pytest.mark.parametrize(
    ("asked", "computed", "loaded"),
    [
        ({}, 0, 3 * SIZE),
        ({"max_load_tokens": 2 * SIZE}, 0, 2 * SIZE),
        ({"max_load_tokens": 2 * SIZE - 1}, 0, SIZE),
        ({"max_load_tokens": SIZE}, SIZE, SIZE),
        ({"max_load_tokens": 0}, 0, 0),
        ({"kv_load_tiers": [{"medium": "CPU"}]}, 0, 0),
        ({"kv_load_tiers": [{"medium": "STORAGE", "locality": "LOCAL"}]}, 0, 3 * SIZE),
    ],
    ids=str,
)
def test_no_more_is_loaded_than_is_allowed(
    asked: dict[str, Any], computed: int, loaded: int
) -> None:
    with side(3) as one:
        prompt = request(3 * SIZE + 2, kv_transfer_params=asked)
        one.track(prompt)
        wait_until(lambda: one.match(prompt, computed)[0] is not None)
        assert one.match(prompt, computed)[0] == loaded


@pytest.mark.parametrize(
    ("asked", "saved"),
    [({}, 3), ({"max_offload_tokens": 2 * SIZE + 1}, 2), ({"max_offload_tokens": 0}, 0)],
    ids=str,
)
def test_no_more_is_saved_than_is_allowed(asked: dict[str, Any], saved: int) -> None:
    with side(0) as one:
        prompt = request(3 * SIZE, kv_transfer_params=asked)
        one.track(prompt)
        wait_until(lambda: one.match(prompt, 0)[0] is not None)
        one.plan_load(prompt, (), 0)
        plans = one.plan_step(step({"r": 3 * SIZE}, [3, 4, 5, 6, 7, 8])).saves
        assert sum(len(plan.moves) for plan in plans) == saved
