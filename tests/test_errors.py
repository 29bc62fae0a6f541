"""The advice that errors give works."""

import subprocess
import sys

from objkv.errors import pip_install


def test_the_advice_to_install_an_extra_needs_no_objkv_from_a_registry() -> None:
    # As the messages print it. --no-index: pip may not look anything up.
    command = pip_install("encryption").replace("'", "").split()[1:]
    pip = [sys.executable, "-m", "pip", *command, "--dry-run", "--no-index"]
    ran = subprocess.run(pip, capture_output=True, text=True, cwd="/")
    assert ran.returncode == 0, ran.stderr
    assert "Requirement already satisfied: cryptography" in ran.stdout
