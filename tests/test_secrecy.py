"""What is masked in the words of errors, and what is left as it is; errors show nothing that a
terminal or a log obeys, and their advice works."""

import subprocess
import sys
import traceback

import pytest

from objkv.config import load_config
from objkv.errors import StoreDenied, StoreError, pip_install
from objkv.redact import KNOWN_MAX, keep_secret, without_secrets


def test_a_secret_is_masked_however_it_is_spelled() -> None:
    keep_secret("pass/word+1")
    assert without_secrets("AUTH pass/word+1; pass%2Fword%2B1!") == "AUTH ***; ***!"


def test_a_short_one_is_masked_as_a_word_only() -> None:
    keep_secret("secret", "abc", "", None)
    assert without_secrets("set s3_secret_access_key, not secret abc") == (
        "set s3_secret_access_key, not *** abc"
    )


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("x-amz-security-token:AbC/d+e==\nhost:x", "x-amz-security-token:***\nhost:x"),
        ("X-Amz-Security-Token=AbC&x=1", "X-Amz-Security-Token=***&x=1"),
        (
            "Credential=AKIAX/2026/us-east-1, Signature=0af, x",
            "Credential=***, Signature=***, x",
        ),
        ("the bucket does not exist", "the bucket does not exist"),
    ],
)
def test_what_signs_a_request_is_masked_though_nobody_named_it(text: str, masked: str) -> None:
    assert without_secrets(text) == masked


def test_a_secret_is_masked_without_the_line_end_that_came_with_it() -> None:
    load_config({"redis_password": "open-sesame\n"}, environ={})
    assert without_secrets("AUTH open-sesame.") == "AUTH ***."


def test_errors_mask_their_own_words_and_those_they_follow_from() -> None:
    secret = "-".join(["hunter2"] * 2)
    keep_secret(secret)

    def fail() -> None:
        try:
            try:
                raise OSError(5, secret)
            except OSError as exc:
                raise ValueError(f"AUTH {secret}", 7) from exc
        except ValueError as exc:
            raise StoreDenied(f"denied: {exc}") from exc

    with pytest.raises(StoreError) as caught:
        fail()
    assert secret not in "".join(traceback.format_exception(caught.value))
    assert str(caught.value) == "denied: ('AUTH ***', 7)"
    assert caught.value.__cause__.args == ("AUTH ***", 7)  # type: ignore[union-attr]


def test_the_latest_secrets_are_remembered() -> None:
    keep_secret(*(f"a-secret-{number}" for number in range(KNOWN_MAX + 1)))
    assert without_secrets(f"a-secret-{KNOWN_MAX}, a-secret-0") == "***, a-secret-0"


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
