"""The page shows exactly the tested matrix."""

from objkv.agent.http.metrics import TOTALS
from objkv.connector.counters import COUNTERS
from tests.faults import table
from tests.faults.rows import ROWS, VERBS


def test_the_page_is_as_it_would_be_written() -> None:
    assert table.page() == table.PAGE.read_text(), "run python -m tests.faults.table"


SILENT = """
s3-flipped:save redis-flipped:lookup redis-failover:lookup redis-evicting:lookup redis-wiped:lookup
sqlite-removed:lookup sqlite-clock-ahead:lookup sqlite-clock-behind:save model-revision:lookup
agent-killed-busy:save
"""


def test_a_loss_that_is_not_counted_is_one_that_nobody_can_notice() -> None:
    cells = {f"{row.name}:{verb}": row.cell(verb) for row in ROWS for verb in VERBS}
    lost = {name: cell for name, cell in cells.items() if cell.outcome in ("miss", "drop")}
    assert {name for name, cell in lost.items() if not cell.counted} == set(SILENT.split())


def test_every_fault_is_counted_by_a_metric_that_operators_can_see() -> None:
    counted = {row.cell(verb).counted for row in ROWS for verb in VERBS} - {""}
    assert counted <= set(COUNTERS) | {f"agent_{name}" for name in TOTALS}
