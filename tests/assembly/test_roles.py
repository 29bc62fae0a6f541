"""The effect of a role in the settings: read-only stores, prefixes, and permission to start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import Backends, check_backends, open_backends
from objkv.config import Config, load_config
from objkv.errors import ConfigError, StoreDenied
from objkv.index.guarded import for_operators
from objkv.telemetry import NullRecorder
from tests.support.samples import NAMESPACE, save


def config(tmp_path: Path, **changes: Any) -> Config:
    given = {"bulk_url": f"file://{tmp_path}/b", "index_url": f"sqlite://{tmp_path}/i"}
    return load_config(given | changes, environ={})


def test_a_reader_finds_and_gets_and_changes_nothing(tmp_path: Path) -> None:
    with open_backends(config(tmp_path), NullRecorder()) as ends:
        keys = save(ends.bulk, ends.index)
    hashes = [key.prefix_hash for key in keys]
    with open_backends(config(tmp_path, role="reader"), NullRecorder()) as ends:
        check_backends(ends, config(tmp_path, role="reader"))
        assert None not in ends.index.lookup(NAMESPACE, hashes)
        assert ends.bulk.get(keys[0].path()) is not None
        before = ends.index.lookup(NAMESPACE, hashes)
        ends.index.touch(NAMESPACE, hashes, ttl_s=60)
        assert ends.index.lookup(NAMESPACE, hashes) == before
        assert not ends.index.lease("x", "me", ttl_ms=1_000)
        writes: tuple[Callable[[Backends], object], ...] = (
            lambda ends: ends.bulk.put("k", b"x"),
            lambda ends: ends.bulk.put_if_absent("k", b"x"),
            lambda ends: ends.bulk.delete(keys[0].path()),
            lambda ends: for_operators(ends.admin),
        )
        for write in writes:
            with pytest.raises(StoreDenied, match="role reader"):
                write(ends)
        assert None not in ends.index.lookup(NAMESPACE, hashes)


def test_no_replica_starts_as_a_sweeper(tmp_path: Path) -> None:
    settings = config(tmp_path, role="sweeper")
    with open_backends(settings, NullRecorder()) as ends:
        with pytest.raises(ConfigError, match="role sweeper is not for replicas"):
            check_backends(ends, settings)
        ends.bulk.put("k", b"x")  # it does not hinder commands


def test_every_key_in_redis_begins_with_the_prefix() -> None:
    settings = Config(bulk_url="memory:", index_url="redis://127.0.0.1:1", redis_prefix="objkv-a")
    with open_backends(settings, NullRecorder()) as ends:
        assert "objkv-a:*" in repr(ends.index)
        assert "objkv-a:p:*" in repr(ends.hot)
