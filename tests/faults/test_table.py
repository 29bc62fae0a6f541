"""The page shows exactly the tested matrix."""

from objkv.agent.http.metrics import TOTALS
from objkv.connector.counters import COUNTERS
from tests.faults import table
from tests.faults.rows import ROWS, VERBS


def test_the_page_is_as_it_would_be_written() -> None:
    assert table.page() == table.PAGE.read_text(), "run python -m tests.faults.table"


def test_every_fault_is_counted_by_a_metric_that_operators_can_see() -> None:
    counted = {row.cell(verb).counted for row in ROWS for verb in VERBS} - {""}
    assert counted <= set(COUNTERS) | {f"agent_{name}" for name in TOTALS}


def test_a_loss_that_is_not_counted_is_one_that_nobody_can_notice() -> None:
    """A wiped or evicted record, or one lost in a fail-over, is an ordinary miss for the reader."""
    silent = {
        (row.name, verb)
        for row in ROWS
        for verb in VERBS
        if row.cell(verb).outcome in ("miss", "drop") and not row.cell(verb).counted
    }
    assert silent == {
        ("s3-flipped", "save"),
        ("redis-flipped", "lookup"),
        ("redis-failover", "lookup"),
        ("redis-evicting", "lookup"),
        ("redis-wiped", "lookup"),
        ("sqlite-removed", "lookup"),
        ("sqlite-clock-ahead", "lookup"),
        ("sqlite-clock-behind", "save"),
        ("model-revision", "lookup"),
        ("agent-killed-busy", "save"),
    }
