"""Saves in the background: what becomes of a payload, of its lease and of its memory."""

from collections.abc import Callable
from typing import Any

import pytest

from objkv.agent.messages import CommitStatus
from objkv.codec.payload import read_header
from objkv.errors import StoreUnavailable
from tests.agent.world import PATIENCE_S, Node, down, payloads

PAYLOAD = payloads()[0]
PATH = read_header(PAYLOAD).claim.key.path()


def save(node: Node) -> None:
    """Have the payload saved, or not; what it had is free again."""
    assert node.commit_one(PAYLOAD) is CommitStatus.ACCEPTED
    assert node.saves.drain(PATIENCE_S)
    assert node.arena_cache.leased() == 0
    is_saved = node.cache.in_flight.is_saved(PATH)
    assert node.index.lease(PATH, "another", ttl_ms=60_000)
    node.index.release(PATH, "another")
    assert is_saved or node.cache.in_flight.begin(PATH)
    node.cache.in_flight.end(PATH)


def raising(error: Exception) -> Callable[..., bool]:
    def put(*_: object) -> bool:
        raise type(error)(*error.args)  # one that is kept keeps all that its frames had

    return put


@pytest.mark.parametrize("publishes", [True, False])
def test_a_save_is_made_under_its_lease_which_its_record_gives_back(
    publishes: bool, make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    put, was_leased = node.store.put_if_absent, list[bool]()
    if publishes:
        monkeypatch.setattr(node.cache, "release_lease", lambda key: pytest.fail("a third call"))
    else:
        monkeypatch.setattr(node.index, "publish", down)

    def seen(key: str, value: Any) -> bool:
        was_leased.append(not node.index.lease(key, "another", ttl_ms=60_000))
        return bool(put(key, value))

    node.store.put_if_absent = seen
    save(node)
    assert was_leased == [True]
    assert node.recorder.value("saves") == 1


def test_a_late_save_is_dropped(make: Callable[..., Node]) -> None:
    node = make(save_deadline_s=0.0)
    save(node)
    assert node.store.get(PATH) is None
    assert node.recorder.value("save_drops") == 1


@pytest.mark.parametrize("error", [StoreUnavailable("down"), RuntimeError("a bug")])
def test_a_save_that_fails_gives_back_all_that_it_had(
    error: Exception, make: Callable[..., Node]
) -> None:
    node = make()
    node.store.put_if_absent = raising(error)
    save(node)
    assert node.recorder.value("save_errors") == 1
