"""Errors show nothing that a terminal or a log obeys, and their advice works."""

import subprocess
import sys

from objkv.errors import StoreDenied, pip_install


def test_the_advice_to_install_an_extra_needs_no_objkv_from_a_registry() -> None:
    # As the messages print it. --no-index: pip may not look anything up.
    command = pip_install("encryption").replace("'", "").split()[1:]
    pip = [sys.executable, "-m", "pip", *command, "--dry-run", "--no-index"]
    ran = subprocess.run(pip, capture_output=True, text=True, cwd="/")
    assert ran.returncode == 0, ran.stderr
    assert "Requirement already satisfied: cryptography" in ran.stdout


def test_the_text_of_a_server_is_one_line_without_control_characters() -> None:
    text = str(StoreDenied("get x: \x1b]0;owned\x07\x9b2J\nERROR forged\u202e"))
    assert text.isprintable()
    assert "ERROR forged" in text
