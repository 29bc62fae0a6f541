"""Numbers are kept until drained; trouble is told when it begins and when it ends."""

import logging

import pytest

from objkv.telemetry import FailureLog, MemoryRecorder


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
    trouble = FailureLog(logging.getLogger("objkv.test"), "saves")
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
