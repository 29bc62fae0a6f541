"""The payloads that count against a quota, by kind of store and index."""

from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import open_backends, open_room
from objkv.cache.quota import Quota
from objkv.config import Config
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.support.samples import save, save_identity


def config(tmp_path: Path, **changes: Any) -> Config:
    values = {"bulk_url": f"file://{tmp_path}/chunks", "index_url": f"sqlite://{tmp_path}/i.sqlite"}
    return Config.model_validate(values | {"quota_bytes": 1_000} | changes)


@pytest.mark.parametrize("index", ["sqlite", "bulk:"])
def test_the_tenants_payloads_count(tmp_path: Path, index: str) -> None:
    changes = {} if index == "sqlite" else {"index_url": index}
    settings = config(tmp_path, **changes)
    with open_backends(settings, NullRecorder()) as backends:
        room = open_room(settings, backends, MemoryRecorder())
        assert isinstance(room, Quota)
        save_identity(backends.bulk)
        room.read()
        assert repr(room) == "<Quota 0 of 950 bytes>"
        save(backends.bulk, backends.index)
        room.read()
        nbytes = sum(one.nbytes for one in backends.index.usage())
        assert repr(room) == f"<Quota {nbytes} of 950 bytes>"
        assert not room.has_room()
        room.close()


def test_what_expired_in_the_index_of_a_machine_counts_while_it_lies_there(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with open_backends(settings, NullRecorder()) as backends:
        save_identity(backends.bulk)
        save(backends.bulk, None)
        room = open_room(settings, backends, MemoryRecorder())
        assert isinstance(room, Quota)
        room.read()
        assert not room.has_room()
        room.close()


def test_without_a_quota_nothing_is_read(tmp_path: Path) -> None:
    settings = config(tmp_path, quota_bytes=0)
    with open_backends(settings, NullRecorder()) as backends:
        assert open_room(settings, backends, NullRecorder()) is None
