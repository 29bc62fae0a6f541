"""How programs that serve until they are stopped log and end."""

import logging
import signal
import subprocess
import sys
from typing import Any

import pytest

from objkv.cli import agent as module
from objkv.cli.command import end_signals


def test_a_line_that_is_logged_too_often_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, text, limit = 0.0, list[str](), module.LogLimit()
    for name, value in {"_LINES_MAX": 2, "_WITHIN_S": 10.0, "monotonic": lambda: now}.items():
        monkeypatch.setattr(module, name, value)
    for now in (0.0, 1.0, 2.0, 3.0, 11.0):
        record = logging.LogRecord(
            "objkv", logging.WARNING, "x.py", 7, "refused n=%d", (int(now),), None
        )
        if limit.filter(record):
            text.append(record.getMessage())
    assert limit.filter(logging.LogRecord("objkv", logging.WARNING, "x.py", 8, "other", None, None))
    assert text == ["refused n=0", "refused n=1", "refused n=11 (and 2 more before)"]


def test_routine_lines_of_libraries_are_not_logged_as_objkvs() -> None:
    program = (
        "import logging, sys\nfrom objkv.cli import agent, app\n"
        "class Quick:\n"
        "    def __init__(self, *_, **__): pass\n"
        "    def __enter__(self):\n"
        "        logging.getLogger('numexpr').info('2 threads')\n"
        "        logging.getLogger('objkv.agent').info('ready')\n"
        "        sys.exit()\n"
        "    def __exit__(self, *_): pass\n"
        "agent.NodeAgent = Quick\napp.app(['agent', '--socket', '/none'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert [line.partition("objkv: ")[2] for line in ran.stderr.splitlines()] == ["ready"]


def test_a_signal_takes_no_lock_which_the_thread_that_it_interrupts_may_hold() -> None:
    called: list[str] = []

    def seen(frame: Any, event: str, function: Any) -> None:
        called.append(function.__name__ if event.startswith("c_") else frame.f_code.co_name)

    before = signal.getsignal(signal.SIGTERM)
    with end_signals() as ended:
        assert not ended.wait(0)
        handler: Any = signal.getsignal(signal.SIGTERM)
        sys.setprofile(seen)
        handler(signal.SIGTERM, None)
        sys.setprofile(None)
        assert set(called) == {"end", "eventfd_write", "setprofile"}
        assert ended.wait()
        assert ended.wait(), "for ever"
    assert signal.getsignal(signal.SIGTERM) is before
