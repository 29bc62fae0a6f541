"""The files that are written from the code: ``python -m scripts.pages`` writes them all, and
``python -m scripts.checks pages`` finds those that are stale."""

import os
from pathlib import Path

os.environ.pop("XDG_CACHE_HOME", None)  # Defaults on the pages are those below ~.

from scripts import (
    write_api,
    write_cli,
    write_configuration,
    write_metrics,
    write_models,
    write_rights,
)

PAGES = (
    write_api,
    write_cli,
    write_configuration,
    write_metrics,
    write_models,
    write_rights,
)


def files() -> dict[Path, str]:
    """Each file with the text that it should have."""
    rights = {write_rights.FILE: write_rights.text()}
    return {one.PAGE: one.page() for one in PAGES} | rights


if __name__ == "__main__":
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
