"""Replicas of one test share a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connector.tier.world import Engine, init_hashes


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    """Makes replicas that share one folder, and closes them."""
    init_hashes()
    made: list[Engine] = []

    def make(tier: dict[str, Any] | None = None, **changes: Any) -> Engine:
        made.append(Engine(tmp_path, tier, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
