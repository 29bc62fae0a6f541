"""Which namespaces an import is about, while others delete what it reads."""

import pytest

from objkv.errors import ConfigError
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import BackendsView
from objkv.ops.export.import_ import arrivals
from objkv.stores.memory import MemoryStore
from tests.ops.world import IDENTITY, NAMESPACE, save_identity


def view_of(bulk: MemoryStore, index: MemoryIndex) -> BackendsView:
    return BackendsView(bulk, None, index, False, ttl_s=3_600, lease_ms=60_000, owner="import-test")


def test_a_document_that_is_deleted_meanwhile_comes_from_the_export() -> None:
    class Losing(MemoryStore):
        reads = 0

        def get_range(self, key: str, start: int, end: int) -> bytes | None:
            self.reads += key == identity_path(NAMESPACE)
            if self.reads > 1:
                self.delete(identity_path(NAMESPACE))
            return super().get_range(key, start, end)

    bulk, source = Losing(), MemoryStore()
    save_identity(bulk)
    save_identity(source)
    [found] = arrivals(view_of(bulk, MemoryIndex()), source, [NAMESPACE])
    assert (found.document, found.identity) == (IDENTITY.canonical(), IDENTITY)
    bulk = Losing()
    save_identity(bulk)
    with pytest.raises(ConfigError, match="cannot be told"):
        arrivals(view_of(bulk, MemoryIndex()), MemoryStore(), [NAMESPACE])
