"""What may be stored of a draft after a load that found only the target's KV."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.connector.kv.drafts import DraftGaps
from objkv.connector.kv.requests import TrackedRequest
from objkv.keys.prefix import PrefixChain, PromptExtras
from tests.connector.kv.test_draft_world import CHUNK, NAMESPACE, geometry

SHAPE = geometry(None, draft=True)


def tracked(tokens: list[int], local: int = 0) -> TrackedRequest:
    chain = PrefixChain(NAMESPACE, CHUNK, PromptExtras(), digests=True)
    chain.extend(tokens, len(tokens) // CHUNK * CHUNK)
    request = cast("Any", SimpleNamespace(request_id=f"{tokens[-1]}"))
    one = TrackedRequest(request, NAMESPACE, local=local)
    one.hashes = cast("Any", SimpleNamespace(chain=chain))
    return one


ONE = [1] * (5 * CHUNK)


@pytest.fixture
def gaps() -> DraftGaps:
    """After a load of ``ONE`` whose draft was stored up to the end of the second chunk."""
    gaps = DraftGaps(SHAPE)
    gaps.lost(one := tracked(ONE), 2 * CHUNK)
    assert not gaps.is_complete(one, 4), "the request itself stores nothing"
    return gaps


@pytest.mark.parametrize(
    ("local", "complete"),
    [(0, True), (CHUNK, True), (2 * CHUNK, True), (2 * CHUNK + 2, False), (4 * CHUNK, False)],
)
def test_what_vllm_has_beyond_the_gap_is_not_continued(
    gaps: DraftGaps, local: int, complete: bool
) -> None:
    assert gaps.is_complete(tracked(ONE, local), 4) is complete


@pytest.mark.parametrize("shared", [2 * CHUNK, 2 * CHUNK + 4, 4 * CHUNK])
def test_nor_by_prompts_that_go_on_differently(gaps: DraftGaps, shared: int) -> None:
    """They may share blocks inside the chunk with the gap."""
    other = ONE[:shared] + [2] * (5 * CHUNK - shared)
    assert gaps.is_complete(tracked(other, shared), 4) is (shared == 2 * CHUNK)
    assert gaps.is_complete(tracked([3] * 5 * CHUNK, 4 * CHUNK), 4)


def test_a_request_is_examined_again_after_a_preemption(gaps: DraftGaps) -> None:
    one = tracked(ONE, 4 * CHUNK)
    assert not gaps.is_complete(one, 4)
    one.local, one.draft_complete = 0, True  # as the next match sets them
    assert gaps.is_complete(one, 4)


def test_chunks_before_a_gap_need_no_hashes_behind_it(gaps: DraftGaps) -> None:
    """Those of a long prompt may still be computed when its first chunks are saved."""
    one = tracked(ONE[: 2 * CHUNK], 5 * CHUNK)
    assert gaps.is_complete(one, 1)
    assert not gaps.is_complete(tracked(ONE[: 3 * CHUNK], 5 * CHUNK), 2)
