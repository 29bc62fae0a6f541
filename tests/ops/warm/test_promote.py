"""``warm --promote``: from the bulk to the hot store."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from objkv.cache.promotion import HotLimits, Promoter
from objkv.errors import ConfigError
from objkv.index.memory import MemoryIndex
from objkv.ops.backends_view import BackendsView
from objkv.ops.warm import promote as promote_module
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.report import WarmReport
from objkv.ops.warm.warm import Means, promote_stored
from objkv.stores.base import Arrived
from objkv.stores.memory import MemoryStore
from tests.support.samples import CHUNK, IDENTITY, NAMESPACE, TOKENS, save, save_identity, view_of

LIMITS = HotLimits(1 << 20, 1, 3, 1)
WORKERS = 8
BOUND_S = 120
"""Against a hang; nothing takes this long."""


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


def test_a_namespace_is_promoted_whole_what_is_used_most_first(
    view: BackendsView, index: MemoryIndex
) -> None:
    [used] = [r for r in index.scan(NAMESPACE) if r.token_start == CHUNK]
    index.touch(NAMESPACE, [used.prefix_hash], ttl_s=3600)
    report = promote(view, None, bytes_max=used.nbytes)
    assert report.promotion is not None
    assert (report.promotion.promoted, report.promotion.over_budget) == (1, 2)
    [hot] = [r for r in index.scan(NAMESPACE) if any(s.hot for s in r.shards.values())]
    assert hot.prefix_hash == used.prefix_hash


def test_what_is_hot_is_not_copied_again_unless_the_copy_is_gone(
    view: BackendsView, hot: MemoryStore
) -> None:
    promote(view, None)
    lost = next(hot.scan("")).key
    hot.delete(lost)
    report = promote(view, None)
    assert report.promotion is not None
    assert (report.promotion.hot_before, report.promotion.promoted) == (2, 1)
    assert hot.head(lost) is not None


def test_larger_payloads_than_replicas_keep_hot_are_left_out(
    view: BackendsView, hot: MemoryStore
) -> None:
    report = promote(view, None, HotLimits(10, 1, 3, 1))
    assert report.promotion is not None
    assert report.promotion.too_large == 3
    assert list(hot.scan("")) == []


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


def test_a_prompt_that_is_not_stored_is_a_failure(view: BackendsView) -> None:
    prompts = [
        WarmPrompt("long", tokens=(*TOKENS, *range(CHUNK))),
        WarmPrompt("text", text="hello"),
    ]
    report = promote(view, prompts)
    assert not report.is_complete
    told = {failure.name: failure.why for failure in report.failures}
    assert told["long"] == "3 of 4 chunks are stored"
    assert "text prompts need --tokenizer" in told["text"]
    assert report.promotion is not None
    assert report.promotion.promoted == 3


def test_without_a_hot_store_it_says_so(bulk: MemoryStore, index: MemoryIndex) -> None:
    view = view_of(bulk, index)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a hot store"):
        promote(view, None)


class HeldStore(MemoryStore):
    """Holds all copies until ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.all_copy = threading.Barrier(WORKERS + 1)
        self.go = threading.Event()
        self.went: list[bool] = []
        """Of each copy, whether it was let go."""

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        if not self.go.is_set():
            self.all_copy.wait(BOUND_S)
        self.went.append(self.go.wait(BOUND_S))
        return super().get_into(key, buffer, arrived, start)


def test_an_interruption_waits_for_no_copy_that_has_not_begun(
    index: MemoryIndex, hot: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bulk = HeldStore()
    save_identity(bulk)
    for number in range(40):
        save(bulk, index, tuple(range(1000 * number, 1000 * number + CHUNK)))
    made: list[Promoter] = []
    closed: set[int] = set()

    class Watched(Promoter):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(self)

        def drain(self, deadline_s: float) -> bool:
            if self is not made[0]:
                return super().drain(deadline_s)
            bulk.all_copy.wait(BOUND_S)
            raise KeyboardInterrupt  # comes out where the results are waited for

        def close(self, deadline_s: float) -> bool:
            done = super().close(deadline_s)
            closed.add(id(self))
            if len(closed) == WORKERS:  # what waits is dropped before any copy ends
                bulk.go.set()
            return done

    monkeypatch.setattr(promote_module, "Promoter", Watched)
    report = promote(view_of(bulk, index, hot), None)
    assert report.ending == "interrupted"
    assert bulk.went == [True] * WORKERS  # those under way, one of each thread
