"""Blocks that a failed load left unfilled are no longer found in vLLM's prefix cache."""

from typing import Any, cast

from objkv.connector.hooks import evict_failed, holds_nothing


class Manager:
    """What is used of vLLM's ``KVCacheManager``."""

    usage = 0.0

    def __init__(self, tables: dict[str, list[int]]) -> None:
        self._tables = tables
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self._tables.get(request_id, []),)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids


def test_the_first_failed_block_and_all_after_it_are_forgotten_in_every_request() -> None:
    manager = Manager({"a": [1, 2, 3, 4], "b": [1, 2, 9], "c": [7, 8], "waiting": []})
    evict_failed(cast(Any, manager), ["a", "b", "c", "waiting", "unknown"], [], {2})
    assert manager.evicted == {2, 3, 4, 9}


def test_they_are_forgotten_in_a_request_that_was_aborted_in_that_step_too() -> None:
    """It has no blocks any more, but the prefix cache knows those computed after the failed one."""
    manager = Manager({"b": [1, 2, 9]})
    evict_failed(cast(Any, manager), ["b"], [[1, 2, 3, 4], [5, 6]], {2})
    assert manager.evicted == {2, 3, 4, 9}


def test_a_cache_holds_nothing_when_no_block_is_in_use() -> None:
    manager = Manager({})
    assert holds_nothing(cast(Any, manager))
    manager.usage = 0.1
    assert not holds_nothing(cast(Any, manager))
    assert not holds_nothing(None)
