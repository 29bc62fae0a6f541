"""What counts as reached."""

import pytest

from objkv.ops.bench.harness import BenchReport, BenchRow, Section, Target, describe_machine


@pytest.mark.parametrize(
    ("target", "ok"),
    [
        (None, None),
        (Target(0.85), True),
        (Target(0.95), False),
        (Target(0.95, at_most=True), True),
        (Target(100, at_most=True, of="ours"), True),
        (Target(40, at_most=True, of="ours"), False),
    ],
)
def test_a_target_is_of_the_ratio_or_of_the_figure_at_least_or_at_most(
    target: Target | None, ok: bool | None
) -> None:
    assert BenchRow("x", "µs", 50.0, limit=55.0, ratio=0.9, target=target).ok is ok


def test_a_report_names_the_rows_that_miss() -> None:
    rows = [BenchRow("x", "s", 1.0, target=Target(bound, of="ours")) for bound in (0.5, 2.0)]
    rows.append(BenchRow("y", "s", 1.0))
    report = BenchReport("0", describe_machine(), 1, True, (Section("s", tuple(rows), {}),))
    assert report.missed == (rows[1],)


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.cpu
    assert machine.libraries["numpy"]
