"""Probes of those who may not do all that replicas do: nothing is put that they may not put."""

import pytest

from objkv.errors import StoreDenied
from objkv.index.guarded import INDEX_VERBS, GuardedIndex
from objkv.index.memory import MemoryIndex
from objkv.ops.doctor.probes import probe_index_as, probe_store, probe_store_as
from objkv.stores.base import Buffer
from objkv.stores.guarded import GuardedStore
from objkv.stores.memory import MemoryStore
from tests.stores.guards import guard_of


class _NoDeletes(MemoryStore):
    def delete(self, key: str) -> bool:
        raise StoreDenied("403")


class _NoPuts(MemoryStore):
    def put(self, key: str, value: Buffer) -> None:
        raise StoreDenied("403")

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        raise StoreDenied("403")


@pytest.mark.parametrize("area", ["bulk", "hot"])
def test_a_reader_is_well_without_writing(area: str) -> None:
    store = GuardedStore(MemoryStore(), guard_of(may_write=False))
    checks = probe_store_as("reader", area, store)  # type: ignore[arg-type]
    assert {check.status for check in checks} == {"ok"}
    index = MemoryIndex()
    guard = guard_of("index", verbs=INDEX_VERBS, may_write=False)
    checks = probe_index_as("reader", GuardedIndex(index, guard))
    assert [check.status for check in checks] == ["ok"] * 3
    assert index.namespaces() == []


@pytest.mark.parametrize("area", ["bulk", "hot"])
def test_a_sweeper_is_well_without_putting(area: str) -> None:
    store = _NoPuts()
    checks = probe_store_as("sweeper", area, store)  # type: ignore[arg-type]
    assert {check.status for check in checks} == {"ok"}
    assert "delete nothing" in [check.name for check in checks]
    assert {check.status for check in probe_index_as("sweeper", MemoryIndex())} == {"ok"}


def test_a_writer_is_well_without_deleting() -> None:
    checks = probe_store("bulk", _NoDeletes())
    assert [check.status for check in checks] == ["ok"] * 7 + ["skipped"]
    assert "nor needed" in checks[-1].detail


def test_what_comes_back_for_a_key_that_cannot_exist_is_told() -> None:
    class Lying(MemoryStore):
        def get(self, key: str) -> bytes | None:
            return b"x"

    checks = probe_store_as("reader", "bulk", Lying())
    assert [check.name for check in checks if check.status == "failed"] == ["get nothing"]
