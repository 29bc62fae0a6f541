"""``ReadOnlyStore``: a replica with the rights of a reader sends nothing that needs others."""

from collections.abc import Callable

import pytest

from objkv.errors import StoreDenied
from objkv.stores.base import Unfinished
from objkv.stores.memory import MemoryStore
from objkv.stores.readonly import ReadOnlyStore
from objkv.testing.flaky import FlakyStore


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.put("k", b"2"),
        lambda store: store.put_if_absent("l", b"2"),
        lambda store: store.delete("k"),
        lambda store: store.discard(Unfinished("k", "x", 1, 0.0)),
    ],
)
def test_what_would_write_is_denied_with_what_to_set_and_sent_nowhere(
    write: Callable[[ReadOnlyStore], object],
) -> None:
    inner = FlakyStore(MemoryStore())
    inner.put("k", b"1")
    asked = len(inner.calls)
    store = ReadOnlyStore(inner)
    with pytest.raises(StoreDenied, match="set role to writer or sweeper"):
        write(store)
    assert len(inner.calls) == asked
    assert store.get("k") == b"1"
    assert [entry.key for entry in store.scan("")] == ["k"]
