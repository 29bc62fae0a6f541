"""Calls that time may mend are repeated; scans and refusals are not."""

import pytest

from objkv.errors import StoreDenied, StoreUnavailable
from objkv.ops.backends_view import PATIENCE_S, retrying
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_store import MemoryStore


def test_patience_ends() -> None:
    slept: list[float] = []
    inner = FlakyStore(MemoryStore())
    inner.fail_until_mended(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        retrying(inner, sleep=slept.append).get("a")
    assert PATIENCE_S <= sum(slept) < 2 * PATIENCE_S


def test_what_time_does_not_mend_is_not_repeated() -> None:
    inner = FlakyStore(MemoryStore())
    inner.fail_next(StoreDenied("403"))
    with pytest.raises(StoreDenied):
        retrying(inner, sleep=lambda _: pytest.fail("slept")).get("a")


def test_a_scan_that_breaks_off_is_an_error_and_not_the_end() -> None:
    inner = FlakyStore(MemoryStore())
    for key in "abc":
        inner.put(key, b"")
    scan = retrying(inner, sleep=lambda _: pytest.fail("slept")).scan("")
    next(scan)
    inner.fail_next(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        list(scan)
