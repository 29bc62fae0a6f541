"""``warm --promote``: from the bulk to the hot store."""

from collections.abc import Sequence

import pytest

from objkv.cache.promotion import HotLimits
from objkv.index.memory import MemoryIndex
from objkv.ops.backends_view import BackendsView
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.report import WarmReport
from objkv.ops.warm.warm import Means, promote_stored
from objkv.stores.memory import MemoryStore
from tests.support.samples import CHUNK, IDENTITY, NAMESPACE, TOKENS, save, save_identity, view_of

LIMITS = HotLimits(1 << 20, 1, 3, 1)


@pytest.fixture
def hot() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def view(bulk: MemoryStore, index: MemoryIndex, hot: MemoryStore) -> BackendsView:
    save_identity(bulk)
    save(bulk, index)
    return view_of(bulk, index, hot)  # type: ignore[arg-type]


def promote(
    view: BackendsView,
    prompts: Sequence[WarmPrompt] | None,
    limits: HotLimits = LIMITS,
    bytes_max: int | None = None,
) -> WarmReport:
    return promote_stored(
        Means(view, {}, None, None), prompts, IDENTITY, limits, bytes_max=bytes_max
    )


def records_that_say_hot(index: MemoryIndex) -> int:
    return sum(shard.hot for record in index.scan(NAMESPACE) for shard in record.shards.values())


def test_what_is_stored_of_prompts_is_hot_afterwards(
    view: BackendsView, index: MemoryIndex, hot: MemoryStore, bulk: MemoryStore
) -> None:
    report = promote(view, [WarmPrompt("p", tokens=TOKENS[: 2 * CHUNK])])
    assert report.is_complete
    assert report.promotion is not None
    assert (report.promotion.payloads, report.promotion.promoted) == (2, 2)
    assert records_that_say_hot(index) == 2
    copies = [entry.key for entry in hot.scan("")]
    assert len(copies) == 2
    assert all(hot.get(key) == bulk.get(key) for key in copies)


def test_a_damaged_payload_does_not_become_hot(
    view: BackendsView, bulk: MemoryStore, index: MemoryIndex, hot: MemoryStore
) -> None:
    key = next(entry.key for entry in bulk.scan("") if entry.key.endswith(".safetensors"))
    payload = bytearray(bulk.get(key) or b"")
    payload[-1] ^= 1
    bulk.put(key, bytes(payload))
    report = promote(view, None)
    assert not report.is_complete
    assert [failure.name for failure in report.failures] == [key]
    assert hot.head(key) is None
    assert records_that_say_hot(index) == 2
