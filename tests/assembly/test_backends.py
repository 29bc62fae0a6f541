"""Store and index opened from the settings, wrapped in the stated order, checked at start, and what
a role may do with them."""

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest

from objkv.assembly.backends import (
    Backends,
    _guard,
    call_s,
    check_backends,
    describe_index,
    open_backends,
    open_hot,
)
from objkv.cache.bulk_index import BulkIndex, ListedIndex
from objkv.config import Config, load_config
from objkv.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable
from objkv.index.guarded import GuardedIndex, for_operators
from objkv.index.redis.index import RedisIndex
from objkv.net.breaker import Attempt, BreakerLimits
from objkv.net.deadline import EndsBy, ends_s
from objkv.ops.doctor.probes import probe_index, probe_store
from objkv.stores.guarded import GuardedStore, GuardedValues
from objkv.stores.local import LocalStore
from objkv.stores.redis import RedisStore
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import FIELD, NAMESPACE, save
from tests.support.servers.quick_s3 import Answer, QuickS3, Request, failure
from tests.support.servers.redis import valkey_server

NOBODY = "redis://127.0.0.1:1"


def config_of(tmp_path: Path, **changes: Any) -> Config:
    urls = {"bulk_url": f"file://{tmp_path}/b", "index_url": f"sqlite://{tmp_path}/i/x.sqlite"}
    return load_config({**urls, **changes}, environ={})


def test_nothing_configured_is_a_folder_and_sqlite_that_work(tmp_path: Path) -> None:
    with open_backends(config_of(tmp_path), NullRecorder()) as backends:
        assert backends.hot is None
        checks = [
            *probe_store("writer", "bulk", backends.bulk),
            *probe_index("writer", backends.index),
        ]
    assert {check.status for check in checks} == {"ok"}


def test_a_folder_alone_is_bulk_store_and_index(tmp_path: Path) -> None:
    config = load_config({"bulk_url": f"file://{tmp_path}/b"}, environ={})
    with open_backends(config, NullRecorder()) as backends:
        assert list(tmp_path.iterdir()) == []
        check_backends(backends, config)
        assert type(backends.index) is GuardedIndex
        assert isinstance(backends.index.inner, BulkIndex)
        keys = save(backends.bulk, None)
        found = backends.index.find(NAMESPACE, [key.prefix_hash for key in keys], [FIELD])
        assert all(shards is not None for shards in found)
        assert backends.admin.pin(NAMESPACE, keys[0].prefix_hash, until_s=2**33, ttl_s=1)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_opening_creates_nothing_and_connects_to_nobody(tmp_path: Path) -> None:
    open_backends(config_of(tmp_path), NullRecorder()).close()
    changes = {"bulk_url": "s3://bucket/x", "s3_endpoint_url": "http://127.0.0.1:1"}
    for url in (NOBODY, "redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/0?service=s"):
        open_backends(config_of(tmp_path, index_url=url, **changes), NullRecorder()).close()
    assert list(tmp_path.iterdir()) == []


def test_each_place_has_one_guard_with_the_bounds_and_the_prefix_that_the_settings_give(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, index_url=NOBODY, redis_prefix="objkv-a")
    with open_backends(config, NullRecorder()) as backends:
        assert isinstance(backends.bulk, GuardedStore)
        assert isinstance(backends.bulk.inner, LocalStore)
        assert isinstance(backends.hot, GuardedValues)
        assert isinstance(backends.hot.inner, RedisStore)
        assert isinstance(backends.index, ListedIndex)
        assert isinstance(backends.index.inner, RedisIndex)
        for guard, verb in ((backends.hot.guard, "delete"), (backends.index.guard, "publish")):
            left_s = guard.call(verb, lambda _: ends_s() - monotonic(), "k")
            assert call_s(config) - 1 < left_s <= call_s(config)
        assert backends.index.inner.prefix == "objkv-a"
        with pytest.raises(StoreUnavailable, match="check objkv-a:p:"):
            backends.hot.check()


def test_index_and_payloads_are_on_connections_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup must not wait behind payloads; each has connections of its own."""
    monkeypatch.setattr("objkv.assembly.redis._CONNECTIONS_MIN", 2)
    with valkey_server(tmp_path / "valkey") as server:
        config = config_of(tmp_path, index_url=server.url, load_threads=1)
        with open_backends(config, NullRecorder()) as backends:
            assert backends.hot is not None
            backends.hot.put("k", b"value")
            backends.index.find("ab", [b"x" * 20], ["0.L0-2_H0-2"])
            buffer = memoryview(bytearray(5))
            index: list[Any] = []
            backends.hot.get_into(
                "k",
                buffer,
                # While a payload arrives, and none of its connections is free:
                lambda _: backends.hot.get_into(  # type: ignore[union-attr]
                    "k",
                    memoryview(bytearray(5)),
                    lambda _: index.append(backends.index.find("ab", [b"x" * 20], ["0.a"])),
                ),
            )
            assert index == [[None]]


@pytest.mark.parametrize(
    "changes",
    [{"index_url": "sqlite:///dev/null/i"}, {"index_url": NOBODY, "hot_save_bytes_max": 0}],
)
def test_there_is_no_hot_store_without_redis_or_payloads(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert open_hot(config_of(tmp_path, **changes), NullRecorder()) is None


@pytest.mark.parametrize(
    ("settings", "counts_s", "is_cut_s"),
    [
        ({}, 1.01, 0.99),
        ({"load_deadline_ms": 800}, 0.41, 0.39),
        ({"step_load_deadline_ms": 500}, 0.26, 0.24),
    ],
)
def test_loads_with_half_their_time_left_find_out_a_store_that_stalls_others_do_not(
    settings: dict[str, Any], counts_s: float, is_cut_s: float, tmp_path: Path
) -> None:
    clock = ManualClock(0.0)
    config = config_of(tmp_path, **settings)
    reads = _guard("bulk", config, NullRecorder(), logs=False).breakers.read
    reads.clock = reads.now_s = clock

    def stall() -> None:
        clock.now_s = ends_s()
        raise StoreUnavailable("the deadline passed")

    for given_s, opens in ((is_cut_s, False), (counts_s, True)):
        for _ in range(5):
            assert not reads.is_open
            with (
                pytest.raises(StoreUnavailable, match="passed"),
                EndsBy(clock.now_s + given_s),
                Attempt(reads, "get"),
            ):
                stall()
        assert reads.is_open is opens


@pytest.mark.parametrize("code", ["AccessDenied", "NoSuchBucket"])
def test_a_refusal_while_serving_is_one_error_that_says_what_to_fix_and_its_end_one_line(
    code: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that was removed, or rights that were taken away, for writes alone."""
    refuses = True

    def refuse(request: Request) -> Answer | None:
        status = 403 if code == "AccessDenied" else 404
        return failure(status, code) if refuses and request.method == "PUT" else None

    with QuickS3(intercept=refuse) as server:
        url = {"bulk_url": "s3://kv-cache/p", "s3_endpoint_url": server.url}
        keys = {"s3_access_key_id": "a", "s3_secret_access_key": "b", "s3_addressing": "path"}
        hasty = partial(BreakerLimits, failures=2, reset_s=0.001, reset_max_s=0.001)
        monkeypatch.setattr("objkv.assembly.backends.BreakerLimits", hasty)
        config = load_config({**url, **keys, "index_url": "sqlite:///dev/null/i"}, environ={})
        recorder = MemoryRecorder()
        with open_backends(config, recorder) as backends:
            for _ in range(5):
                with pytest.raises(StoreError):
                    backends.bulk.put_if_absent("k", b"v")
                assert backends.bulk.get("k") is None
            [record] = [r for r in caplog.records if r.name.startswith("objkv")]
            assert record.levelno == logging.ERROR
            assert "bulk writes are refused" in record.message
            assert "credentials lack" in record.message or "create it" in record.message
            assert recorder.value("breaker_open_bulk_write") == 1
            assert recorder.value("breaker_open_bulk_read") == 0
            refuses = False
            while recorder.value("breaker_open_bulk_write"):
                with suppress(StoreUnavailable):  # until the pause is over
                    backends.bulk.put_if_absent("k", b"v")
            assert "bulk writes work again" in caplog.text


def end(kind: type[Any], error: StoreError | None = None) -> Any:
    """A store or an index that can be neither checked nor closed without the error, if any."""
    made = kind()
    made.check, made.close = Mock(side_effect=error), Mock(side_effect=error)
    return made


@pytest.mark.parametrize(
    ("error", "at_start", "raises", "match"),
    [
        (StoreDenied("no such bucket"), "strict", ConfigError, "no such bucket"),
        (StoreDenied("no such bucket"), "degraded", ConfigError, "no such bucket"),
        (StoreUnavailable("refused"), "strict", StoreUnavailable, "at_start is strict"),
        (StoreUnavailable("refused"), "degraded", None, ""),
    ],
)
def test_a_refusal_at_the_start_is_always_the_operators_an_outage_if_strict_else_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: StoreError,
    at_start: str,
    raises: type[Exception] | None,
    match: str,
) -> None:
    config = config_of(tmp_path, at_start=at_start, index_url="rediss://me:hunter2@host")
    for backends in (
        Backends(end(MemoryStore, error), None, end(MemoryIndex)),
        Backends(end(MemoryStore), None, end(MemoryIndex, error)),
    ):
        with pytest.raises(raises, match=match) if raises else nullcontext():
            check_backends(backends, config)
    told = [(one.levelno, one.message) for one in caplog.records]
    assert [level for level, _ in told] == ([] if raises else [logging.WARNING] * 2)
    for _, message in told:
        assert "unreachable at start, serving without it" in message
        assert "hunter2" not in message


def test_an_end_that_hangs_does_not_hang_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hangs like a folder on a file system whose server is gone: its thread cannot be
    interrupted."""
    gate, bulk = threading.Event(), end(MemoryStore)
    bulk.check = lambda: gate.wait(5)
    try:
        check_backends(
            Backends(bulk, None, end(MemoryIndex)), config_of(tmp_path, load_deadline_ms=10)
        )
    finally:
        gate.set()
    assert "no response within 0.02 s" in caplog.text


def test_all_ends_are_closed_although_one_fails() -> None:
    ends = end(MemoryStore, StoreError("x")), end(MemoryStore), end(MemoryIndex)
    with pytest.raises(StoreError), Backends(*ends):
        pass
    assert [one.close.call_count for one in ends] == [1, 1, 1]


def test_a_server_that_does_not_answer_cannot_be_described(tmp_path: Path) -> None:
    assert describe_index(config_of(tmp_path)) is None, "there is none"
    for url in (NOBODY, "redis+cluster://127.0.0.1:1"):
        with pytest.raises(StoreUnavailable):
            describe_index(config_of(tmp_path, index_url=url))


# Roles.


def test_a_reader_finds_and_gets_and_changes_nothing(tmp_path: Path) -> None:
    with open_backends(config_of(tmp_path), NullRecorder()) as ends:
        keys = save(ends.bulk, ends.index)
        hashes = [key.prefix_hash for key in keys]
        before = ends.index.lookup(NAMESPACE, hashes)
    config = config_of(tmp_path, role="reader")
    with open_backends(config, NullRecorder()) as ends:
        check_backends(ends, config)
        assert ends.bulk.get(keys[0].path()) is not None
        ends.index.touch(NAMESPACE, hashes, ttl_s=60)
        assert ends.index.lookup(NAMESPACE, hashes) == before
        assert None not in before
        assert not ends.index.lease("x", "me", ttl_ms=1_000)
        writes: tuple[Callable[[], object], ...] = (
            lambda: ends.bulk.put("k", b"x"),
            lambda: ends.bulk.put_if_absent("k", b"x"),
            lambda: ends.bulk.delete(keys[0].path()),
            lambda: for_operators(ends.admin),
        )
        for write in writes:
            with pytest.raises(StoreDenied, match="role reader"):
                write()


def test_no_replica_starts_as_a_sweeper(tmp_path: Path) -> None:
    settings = config_of(tmp_path, role="sweeper")
    with open_backends(settings, NullRecorder()) as ends:
        with pytest.raises(ConfigError, match="role sweeper is not for replicas"):
            check_backends(ends, settings)
        ends.bulk.put("k", b"x")  # it does not hinder commands
