"""What a machine may lack."""

import os

import pytest


def need(missing: str | None) -> None:
    """Skip the test where something is missing; fail it in CI, where nothing may be skipped."""
    if missing:
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
