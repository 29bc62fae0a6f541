"""Namespaces, listed from the index and from the bulk store."""

import pytest

from objkv.keys.identity import identity_path
from objkv.ops.listing import list_namespaces
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
