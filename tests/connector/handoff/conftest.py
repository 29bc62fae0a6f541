"""Engines of one test share a model and its stores."""

from pathlib import Path

import pytest

from tests.connector.handoff.model import model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_folder(tmp_path)
    return tmp_path
