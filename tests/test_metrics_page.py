"""The page of metrics is what the tables of names say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_lists_the_metrics_as_they_are() -> None:
    script = runpy.run_path(str(ROOT / "scripts/write_metrics.py"))
    assert script["PAGE"].read_text() == script["page"](), "run make docs"
