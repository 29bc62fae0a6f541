"""What ``objkv agent`` logs."""

import logging

import pytest

from objkv.cli import agent as module


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
