"""The wall: no module of the package is longer than this."""

from collections.abc import Iterator

from scripts.checks import name_of, tracked

LINES_MAX = 900


def findings() -> Iterator[str]:
    """Each longer module."""
    for path in tracked("objkv/*.py"):
        if (lines := len(path.read_text().splitlines())) > LINES_MAX:
            yield f"{name_of(path)}:{lines}: more than {LINES_MAX} lines: divide the module"
