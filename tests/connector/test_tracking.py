from types import SimpleNamespace
from typing import Any, cast

from objkv.connector.kv.requests import TrackedRequest


def tracked(*, stored: set[int]) -> TrackedRequest:
    return TrackedRequest(cast("Any", SimpleNamespace(request_id="r")), "n" * 32, stored=stored)


def test_each_computed_chunk_that_is_not_stored_is_due_once() -> None:
    request = tracked(stored={0, 2})
    assert request.due(1) == []
    assert request.due(4) == [1, 3]
    assert request.due(4) == []


def test_a_chunk_whose_payload_was_refused_is_due_in_the_step_that_computes_it() -> None:
    """A step later a sliding window may have passed its blocks."""
    request = tracked(stored={0, 1, 2})
    request.again.add(1)
    assert request.due(1) == []
    assert request.due(3) == [1]
    assert request.due(3) == []


def test_a_chunk_whose_save_was_dropped_is_due_again() -> None:
    request = tracked(stored=set())
    assert request.due(2) == [0, 1]
    request.again.add(0)
    assert request.due(2) == [0]
    assert request.due(2) == []


def test_after_many_drops_a_step_tries_few_chunks_again() -> None:
    """Otherwise each step of a long prompt would plan all of them until the last is saved."""
    request = tracked(stored=set())
    assert len(request.due(500)) == 500
    request.again.update(range(500))
    tried: list[int] = []
    while some := request.due(500):
        assert len(some) < 50
        tried += some
    assert tried == list(range(500))
