"""Faults while a lookup misses payloads that another node holds back, and has them put."""

import logging
from collections.abc import Iterator

import pytest

from objkv.cache.lookup import LookupService
from objkv.connector.kv import timing
from tests.faults.nodes import TwoNodes
from tests.faults.places import Servers
from tests.faults.rows import HELD_ROWS, HeldRow
from tests.faults.seen import Lines, Seen
from tests.faults.test_matrix import PATIENT
from tests.faults.toy import STORED_TOKENS, expected
from tests.support.servers.spoil import wait_for

pytestmark = pytest.mark.slow
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
    tokens = nodes.hold_back()
    with monkeypatch.context() as patch:
        if row.lookup.outcome == "hit":
            _wait_for_some(nodes, patch)
        else:
            patch.setattr(timing, "_WAIT_S_MAX", WAIT_S if row.waits else PATIENCE_S)
        seen = _asked(nodes, row.name, tokens)
    seen.check(row.lookup)
    assert seen.counted["put_waits"] == row.is_asked
    assert seen.counted["put_waits_given_up"] == row.waits
    assert nodes.lost() == []
    monkeypatch.setattr(timing, "_WAIT_S_MAX", PATIENCE_S)
    assert wait_for(lambda: nodes.asker.answer(tokens).loaded == STORED_TOKENS)
    assert wait_for(nodes.comes, bound_s=PATIENCE_S)
    assert nodes.lost() == []


def _wait_for_some(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the asker's wait end as soon as a payload has come, however busy the machine is."""
    coming = LookupService.coming

    def after_some(self: LookupService, request_id: str) -> range:
        chunks = coming(self, request_id)
        nodes.servers.clock.pauses_ahead_s += 2 * PATIENCE_S * bool(chunks.start)
        return chunks

    monkeypatch.setattr(timing, "_WAIT_S_MAX", PATIENCE_S)
    monkeypatch.setattr(LookupService, "coming", after_some)


def _asked(nodes: TwoNodes, fault: str, tokens: list[int]) -> Seen:
    """A request under a fault. That it ends shows that it does not wait for the fault's end."""
    before, lines, logger = nodes.asker.counted(), Lines(), logging.getLogger("objkv")
    logger.addHandler(lines)
    mend = nodes.inject(fault)
    try:
        answer = nodes.asker.answer(tokens)
    finally:
        mend()
        logger.removeHandler(lines)
    outcome = "hit" if 0 < answer.loaded < STORED_TOKENS else "miss"
    counted = {name: value - before.get(name, 0) for name, value in nodes.asker.counted().items()}
    right = answer.tokens == expected(tokens)
    return Seen(outcome, right, counted, lines.lines, ended=True)
