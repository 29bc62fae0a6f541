"""What ``docs/sharing.md`` says is shown by the tests that it names, which must be there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NAMED = re.compile(r"`(tests/[a-z_/]+\.py)(?:::(test_[a-z0-9_]+))?`")


def test_every_cell_names_tests_that_there_are() -> None:
    text = (ROOT / "docs" / "sharing.md").read_text()
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and "shown by" not in line.lower()
    ]
    assert len(rows) > 20
    for row in rows:
        named = _NAMED.findall(row)
        assert named, row
        for path, function in named:
            assert (ROOT / path).is_file(), path
            assert f"def {function}" in (ROOT / path).read_text(), f"{path}::{function}"
