"""Namespaces, listed from the index and from the bulk store."""

import pytest

from objkv.keys.identity import identity_path
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.walk import ReadView, Walk, find_places
from objkv.ops.listing import counted_namespaces, list_namespaces
from objkv.ops.runs import WorkPool
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import (
    CHUNK,
    LEFT,
    NAMESPACE,
    RIGHT,
    save,
    save_identity,
)


def test_a_namespace_is_described_by_its_totals_and_no_record_is_read(
    bulk: MemoryStore, index: MemoryIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_identity(bulk)
    keys = save(bulk, index, shards=(LEFT, RIGHT))
    usage = index.usage()
    monkeypatch.setattr(index, "scan", lambda _: pytest.fail("read the records"))
    monkeypatch.setattr(index, "usage", lambda: usage)
    [summary] = list_namespaces(bulk, index)
    assert (summary.namespace, summary.model, summary.tenant) == (NAMESPACE, "acme/tiny", "default")
    assert (summary.kv_dtype, summary.chunk_tokens) == ("bfloat16", CHUNK)
    assert summary.payloads == 6
    assert summary.nbytes == sum(len(bulk.get(key.path()) or b"") for key in keys)
    assert (summary.chunks, summary.tokens, summary.problem) == (None, None, None)


def test_a_namespace_without_a_readable_document_is_still_listed(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    save(bulk, index)
    [summary] = list_namespaces(bulk, index)
    assert (summary.model, summary.problem) == (None, "no identity document")
    bulk.put(identity_path(NAMESPACE), b"{}")
    [summary] = list_namespaces(bulk, index)
    assert summary.model is None
    assert "damaged" in (summary.problem or "")
    assert summary.payloads == 3


def test_the_bulk_store_is_counted_without_the_index(bulk: MemoryStore) -> None:
    save_identity(bulk)
    keys = save(bulk, None, shards=(LEFT, RIGHT))
    view = ReadView(bulk, MemoryIndex(), is_own_index=True)
    inventory = Inventory()
    walk = Walk(view, inventory, find_places(view))
    WorkPool(workers=2).run(walk.payloads())
    [summary] = counted_namespaces(inventory, walk.places)
    assert (summary.chunks, summary.payloads, summary.tokens) == (3, 6, 3 * CHUNK)
    assert summary.nbytes == sum(len(bulk.get(key.path()) or b"") for key in keys)
    assert summary.newest_s is not None
