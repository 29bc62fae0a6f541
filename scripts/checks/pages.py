"""What is written from the code is up to date."""

from collections.abc import Iterator

from scripts.checks import name_of
from scripts.pages import files


def findings() -> Iterator[str]:
    """Each stale file."""
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            yield f"{name_of(path)}:1: stale: run python -m scripts.pages"
