"""What objkv logged is known from what only names a folder called objkv."""

import subprocess
import sys

import pytest

from tests.engine.harness import environment
from tests.engine.loglines import PACKAGE, objkv_errors, parse

READY = "(EngineCore pid=7) INFO 11-22 19:36:51 [scheduler.py:123] objkv ready namespace=16a7\n"
CORE = "(APIServer pid=4) ERROR 11-22 19:36:56 [async_llm.py:707] "
CLONE = "/home/user/objkv"
OF_VLLM = "".join(
    f"{CORE}{line}\n"
    for line in (
        "AsyncLLM output_handler failed.",
        "Traceback (most recent call last):",
        f'  File "{CLONE}/.venv/lib/python3.11/site-packages/vllm/async_llm.py", line 662, in run',
        "    outputs = await engine_core.get_output_async()",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        f"the model is {CLONE}/.cache/models/llama",
    )
)
SPEAKS = f"""
import logging
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger
from objkv.connector.guard import speak_as_vllm
configure_logging(LoggingConfig())
init_logger("vllm.made_up").warning("from {CLONE}")
speak_as_vllm()
try:
    raise ValueError("two\\nlines")
except ValueError:
    logging.getLogger("objkv.transfer").exception("load failed request=%s", "r")
"""


def test_an_error_of_vllm_that_names_the_clone_is_not_of_objkv() -> None:
    assert objkv_errors(READY + OF_VLLM) == []


@pytest.mark.parametrize(
    "message",
    [
        "objkv: load failed unexpectedly request=r",
        "objkv failed, continuing without it method=get_finished",
        "objkv.errors.StoreUnavailable: gone",
        f'  File "{PACKAGE}connector/worker.py", line 137, in start',
        f'  |   File "{PACKAGE}connector/worker.py", line 137, in start',
    ],
)
def test_what_objkv_logged_or_raised_is_of_objkv(message: str) -> None:
    assert objkv_errors(f"{READY}{CORE}{message}\n") == [message]
    assert objkv_errors(f"{READY}{CORE.replace('ERROR', 'WARNING')}{message}\n") == []


def test_lines_are_read_as_vllm_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as where somebody likes colours everywhere
    told = subprocess.run(
        [sys.executable, "-c", SPEAKS],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs, first, *others = parse(told.stdout + told.stderr)
    assert (theirs.level, theirs.message) == ("WARNING", f"from {CLONE}")
    assert (first.level, first.message) == ("ERROR", "objkv: load failed request=r")
    assert first.is_from_objkv
    assert [line.message for line in others][-2:] == ["ValueError: two", "lines"]
    assert not any(line.is_from_objkv for line in (theirs, *others))


def test_a_log_without_a_line_of_objkv_proves_nothing() -> None:
    with pytest.raises(ValueError, match="no line"):
        objkv_errors(OF_VLLM)
