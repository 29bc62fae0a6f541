"""Stores of one machine."""

from pathlib import Path

import pytest


@pytest.fixture
def urls(tmp_path: Path) -> dict[str, str]:
    return {
        "bulk_url": f"file://{tmp_path}/chunks",
        "index_url": f"sqlite://{tmp_path}/index.sqlite",
    }
