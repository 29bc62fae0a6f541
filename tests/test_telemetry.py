"""Numbers are kept until drained; trouble is told when it begins and when it ends."""

import logging

import pytest

from objkv.telemetry import LogLimit, MemoryRecorder, Trouble


def test_counters_and_observations_are_drained_once() -> None:
    recorder = MemoryRecorder()
    recorder.count("loads")
    recorder.count("loads", 2)
    recorder.observe("load_seconds", 0.5)
    recorder.observe("load_seconds", 1.5)
    assert recorder.value("loads") == 3
    assert recorder.drain() == {
        "loads": 3,
        "load_seconds_count": 2,
        "load_seconds_sum": 2.0,
        "load_seconds_max": 1.5,
    }
    assert recorder.drain() == {}


def test_trouble_is_told_once_when_it_begins_and_once_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trouble = Trouble(logging.getLogger("objkv.test"), "saves")
    trouble.worked()
    for _ in range(3):
        trouble.failed(OSError("disk full"))
    trouble.worked()
    trouble.worked()
    trouble.failed(OSError("again"))
    assert [record.getMessage() for record in caplog.records] == [
        "saves failing, serving without them reason=disk full",
        "saves working again",
        "saves failing, serving without them reason=again",
    ]
    # A log that keeps its records keeps no exception, which would keep what had failed.
    assert {type(value) for record in caplog.records for value in record.args or ()} == {str}


def test_a_line_that_is_logged_too_often_is_dropped_and_counted() -> None:
    now, text = 0.0, list[str]()
    limit = LogLimit(2, 10.0, clock=lambda: now)
    for now in (0.0, 1.0, 2.0, 3.0, 11.0):
        record = logging.LogRecord(
            "objkv", logging.WARNING, "x.py", 7, "refused n=%d", (int(now),), None
        )
        if limit.filter(record):
            text.append(record.getMessage())
    assert limit.filter(logging.LogRecord("objkv", logging.WARNING, "x.py", 8, "other", None, None))
    assert text == ["refused n=0", "refused n=1", "refused n=11 (and 2 more before)"]
