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
