"""Saves stop at a quota, according to background readings, and resume when there is room again."""

import logging
from queue import Queue
from threading import Event

import pytest

from objkv.cache.quota import Quota, TenantUsage, read_tenant
from objkv.errors import StoreUnavailable
from objkv.index.base import Usage
from objkv.keys.identity import identity_path
from objkv.telemetry import MemoryRecorder
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import IDENTITY, NAMESPACE, save_identity
from tests.support.servers.redis import wait_until

BOUND_S = 60
OTHER = "f" * 32


class Place:
    def __init__(self) -> None:
        self.used: int | None = 0
        self.was_read = Event()

    def __call__(self) -> int:
        self.was_read.set()
        if self.used is None:
            raise StoreUnavailable("gone")
        return self.used


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


def test_a_full_place_takes_nothing_until_it_has_room(
    place: Place, recorder: MemoryRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    quota = Quota(place, 100, recorder)
    caplog.set_level(logging.WARNING)
    for used, has_room in ((99, True), (100, False), (150, False), (99, True)):
        place.used = used
        quota.read()
        assert quota.has_room() is has_room
    assert [r.getMessage() for r in caplog.records] == [
        "quota reached, saves stopped used_bytes=100 limit_bytes=100",
        "below quota, saves resumed used_bytes=99 limit_bytes=100",
    ]
    quota.close()


def test_what_this_process_saves_counts_at_once(place: Place, recorder: MemoryRecorder) -> None:
    quota = Quota(place, 100, recorder)
    quota.add(1_000)  # not read yet: the first reading will count it
    quota.read()
    quota.add(99)
    assert not quota.is_full
    quota.add(1)
    assert quota.is_full


@pytest.mark.parametrize("used", [0, 100])
def test_what_cannot_be_read_changes_nothing(
    place: Place, recorder: MemoryRecorder, used: int
) -> None:
    quota = Quota(place, 100, recorder)
    place.used = used
    quota.read()
    was_full = quota.is_full
    place.used = None
    quota.read()
    assert quota.is_full is was_full
    assert recorder.value("quota_errors") == 1


def test_the_first_question_begins_reading_and_does_not_wait_for_it(
    recorder: MemoryRecorder,
) -> None:
    begun, go_on = Event(), Event()

    def slow() -> int:
        begun.set()
        assert go_on.wait(BOUND_S)
        return 100

    quota = Quota(slow, 100, recorder)
    assert quota._thread is None
    assert quota.has_room()
    assert begun.wait(BOUND_S)
    assert quota.has_room()
    go_on.set()
    quota.close()
    assert quota._thread is not None
    quota._thread.join(BOUND_S)
    assert not quota._thread.is_alive()
    assert not quota.has_room()


def test_nothing_ends_the_thread_and_the_log_tells_it_once(
    recorder: MemoryRecorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("objkv.cache.quota._INTERVAL_S", 0.0)
    monkeypatch.setattr("objkv.cache.quota._SHARE_MAX", 1e9)
    readings = Queue[int]()

    def used() -> int:
        if readings.qsize() < 3:
            readings.put(0)
            raise RecursionError
        readings.put(100)
        return 100

    quota = Quota(used, 100, recorder)
    for _ in range(4):
        seen = readings.qsize()
        quota.has_room()
        wait_until(lambda seen=seen: readings.qsize() > seen, "a reading")
    wait_until(lambda: not quota.has_room(), "the quota")
    quota.close()
    assert recorder.value("quota_errors") == 3
    assert [r.getMessage() for r in caplog.records if r.exc_info] == [
        "reading how much is stored failed"
    ]


def test_closed_before_it_was_asked_it_starts_nothing(
    place: Place, recorder: MemoryRecorder
) -> None:
    quota = Quota(place, 100, recorder)
    quota.close()
    quota.close()
    assert quota.has_room()
    assert quota._thread is None


def test_only_the_tenants_own_namespaces_count() -> None:
    bulk = MemoryStore()
    save_identity(bulk)
    usages = [Usage(NAMESPACE, 7, 1, 0), Usage(OTHER, 100, 1, 0)]
    assert TenantUsage(lambda: usages, bulk, IDENTITY.tenant)() == 7
    assert TenantUsage(lambda: usages, bulk, "somebody")() == 0


def test_a_namespace_counts_from_the_moment_its_document_is_there() -> None:
    bulk = MemoryStore()
    used = TenantUsage(lambda: [Usage(NAMESPACE, 7, 1, 0)], bulk, IDENTITY.tenant)
    assert used() == 0
    save_identity(bulk)
    assert used() == 7
    bulk.delete(identity_path(NAMESPACE))
    assert used() == 7, "read once"


@pytest.mark.parametrize("document", [b"", b"{}", b'{"tenant": "default"}', b"[" * 100_000])
def test_a_document_that_is_not_the_namespaces_own_names_no_tenant(document: bytes) -> None:
    """Else one tenant could use up another's quota."""
    bulk = MemoryStore()
    bulk.put(identity_path(NAMESPACE), document)
    assert read_tenant(bulk, NAMESPACE) is None
