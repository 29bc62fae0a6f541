"""The Terraform module is formatted. ``terraform test`` in ``terraform/aws`` needs a provider."""

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "terraform"


@pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not installed")
def test_terraform_files_are_formatted() -> None:
    command = ["terraform", "fmt", "-check", "-recursive", str(FOLDER)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
