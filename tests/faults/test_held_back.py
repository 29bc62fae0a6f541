"""Faults while a lookup misses payloads that another node holds back, and has them put."""

import logging
from collections.abc import Iterator

import pytest

from objkv.connector.kv import timing
from tests.faults.nodes import TwoNodes
from tests.faults.places import Servers
from tests.faults.rows import HELD_ROWS, HeldRow
from tests.faults.seen import Lines, Seen
from tests.faults.test_quick import PATIENT
from tests.faults.toy import STORED_TOKENS, expected
from tests.support.servers.spoil import wait_for

WAIT_S = 1.0
"""How long a request waits for what cannot come."""
PATIENCE_S = 60.0

_open: list[TwoNodes] = []


@pytest.fixture
def nodes(servers: Servers) -> TwoNodes:
    """Two nodes, which tests that succeed share."""
    if not _open:
        _open.append(TwoNodes(servers, **PATIENT))
    return _open[0]


@pytest.fixture(scope="module", autouse=True)
def _nodes_end(servers: Servers) -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def test_what_another_node_holds_back_is_loaded(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_WAIT_S_MAX", PATIENCE_S)
    assert nodes.comes()
    assert nodes.lost() == []


@pytest.mark.parametrize("row", HELD_ROWS, ids=lambda row: row.name)
def test_a_fault_is_a_miss_after_a_bounded_wait(
    nodes: TwoNodes, row: HeldRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, lines = nodes.hold_back(), Lines()
    monkeypatch.setattr(timing, "_WAIT_S_MAX", WAIT_S)
    before = nodes.asker.counted()
    logger = logging.getLogger("objkv")
    logger.addHandler(lines)
    mend = nodes.inject(row.name)
    try:
        seen = _asked(nodes, tokens)
    finally:
        mend()
        logger.removeHandler(lines)
    now = nodes.asker.counted()
    seen.counted = {name: value - before.get(name, 0) for name, value in now.items()}
    seen.lines = lines.lines
    seen.check(row.lookup)
    assert seen.counted["put_waits"] == seen.counted["put_waits_given_up"] == row.waits
    assert nodes.lost() == []
    monkeypatch.setattr(timing, "_WAIT_S_MAX", PATIENCE_S)
    assert wait_for(lambda: nodes.asker.answer(tokens).loaded == STORED_TOKENS)
    assert wait_for(nodes.comes, bound_s=PATIENCE_S)
    assert nodes.lost() == []


def _asked(nodes: TwoNodes, tokens: list[int]) -> Seen:
    """A request under the fault. That it ends shows that it waits for no end of the fault."""
    answer = nodes.asker.answer(tokens)
    outcome = "hit" if 0 < answer.loaded < STORED_TOKENS else "miss"
    return Seen(outcome, answer.tokens == expected(tokens), ended=True)
