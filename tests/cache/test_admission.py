"""Which part of a match is loaded, given measurements. Time is an argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.cache.admission import (
    OBSERVATIONS_MIN,
    RETRY_S,
    STEP_TOKENS_MIN,
    AdmissionPolicy,
    ChunkSize,
    LoadTime,
    Mode,
    Tier,
)
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.contracts.clock import ManualClock

MB = 1_000_000


def chunks(count: int, *, nbytes: int = MB, tier: Tier = "bulk") -> list[ChunkSize]:
    return [ChunkSize(nbytes, 256, tier)] * count


def taught(
    clock: ManualClock,
    *,
    bulk_mb_s: float = 100,
    latency_s: float = 0.0,
    hot_mb_s: float | None = None,
    prefill: float = 10_000,
    recorder: MemoryRecorder | None = None,
) -> AdmissionPolicy:
    """One that has measured all this, and has just let a load of each tier through."""
    admission = AdmissionPolicy(lambda: "auto", recorder or NullRecorder(), clock=clock)
    for _ in range(OBSERVATIONS_MIN):
        admission.computed(2_000, 2_000 / prefill)
        admission.loaded("bulk", 10 * MB, LoadTime(latency_s + 10 / bulk_mb_s, latency_s))
        if hot_mb_s is not None:
            admission.loaded("hot", MB, LoadTime(1 / hot_mb_s, 0.0))
    assert admission.admit(chunks(1)) == 1
    if hot_mb_s is not None:
        assert admission.admit(chunks(1, tier="hot")) == 1
    return admission


def test_always_and_never_ask_nobody() -> None:
    modes: tuple[tuple[Mode, int], ...] = (("always", 9), ("never", 0))
    for mode, admitted in modes:
        admission = AdmissionPolicy(lambda mode=mode: mode, NullRecorder(), clock=ManualClock(1e6))
        for _ in range(9):
            admission.computed(2_000, 1e-9)
            admission.loaded("bulk", 1, LoadTime(100.0, 99.0))
        assert admission.admit(chunks(9)) == admitted


def test_nothing_measured_means_everything_is_loaded() -> None:
    admission = AdmissionPolicy(lambda: "auto", NullRecorder(), clock=ManualClock(1e6))
    assert admission.admit(chunks(5)) == 5
    for _ in range(OBSERVATIONS_MIN):
        admission.computed(2_000, 1e-6)
    assert admission.admit(chunks(5)) == 5


def test_a_load_that_would_lose_is_refused_and_counted_unless_others_wait_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    recorder = MemoryRecorder()
    admission = taught(ManualClock(1e6), bulk_mb_s=20, recorder=recorder)  # 50 ms against 25.6
    assert admission.admit(chunks(8)) == 0
    assert recorder.value("admission_refused") == 1
    assert recorder.value("admission_refused_tokens") == 8 * 256
    assert admission.admit(chunks(8)) == 0
    assert "not loading stored tokens" in caplog.text
    assert len(caplog.records) == 1, "each line is logged once"
    assert admission.admit(chunks(8), waiting=1) == 8


def test_a_tail_that_would_lose_is_left_to_compute() -> None:
    recorder = MemoryRecorder()
    admission = taught(ManualClock(1e6), bulk_mb_s=20, hot_mb_s=500, recorder=recorder)
    match = chunks(3, tier="hot") + chunks(4, tier="bulk")
    assert admission.admit(match) == 3
    assert recorder.value("admission_cut") == 1
    assert recorder.value("admission_refused") == 0
    assert recorder.value("admission_refused_tokens") == 4 * 256


def test_a_tier_that_was_left_alone_is_tried_again() -> None:
    clock = ManualClock(1e6)
    admission = taught(clock, bulk_mb_s=20)
    assert admission.admit(chunks(4)) == 0
    clock.advance(RETRY_S)
    assert admission.admit(chunks(4)) == 4
    assert admission.admit(chunks(4)) == 0


def test_one_load_or_step_that_took_very_long_changes_nothing() -> None:
    admission = taught(ManualClock(1e6))
    for _ in range(20):
        admission.loaded("bulk", 10 * MB, LoadTime(0.1, 0.0))
    admission.loaded("bulk", 10 * MB, LoadTime(120.0, 60.0))
    assert admission.admit(chunks(8)) == 8
    admission = taught(ManualClock(1e6), bulk_mb_s=20)
    for _ in range(20):
        admission.computed(2_000, 0.2)
    admission.computed(2_000, 60.0)
    assert admission.admit(chunks(8)) == 0


def test_a_store_that_was_slow_for_long_is_used_again_after_a_few_good_loads() -> None:
    """A store that is refused is measured by only one load in half a minute."""
    clock = ManualClock(1e6)
    admission = taught(clock)
    for _ in range(1_000):
        admission.loaded("bulk", 10 * MB, LoadTime(120.0, 60.0))
    assert admission.admit(chunks(8)) == 0
    probes = 0
    while admission.admit(chunks(8)) == 0:
        clock.advance(RETRY_S)
        assert admission.admit(chunks(8)) == 8
        admission.loaded("bulk", 10 * MB, LoadTime(0.1, 0.0))
        probes += 1
        assert probes <= 5


def test_small_steps_say_nothing_of_computing() -> None:
    admission = taught(ManualClock(1e6))
    for _ in range(1_000):
        admission.computed(STEP_TOKENS_MIN - 1, 1e-9)
    assert admission.admit(chunks(8)) == 8


@given(
    st.floats(1, 10_000),
    st.floats(0, 1),
    st.floats(100, 1e6),
    st.lists(st.tuples(st.integers(1, 64 * MB), st.sampled_from(["hot", "bulk"])), max_size=40),
)
def test_no_other_end_would_have_saved_more_by_what_was_measured(
    mb_s: float, latency_s: float, prefill: float, sizes: list[tuple[int, Tier]]
) -> None:
    admission = taught(
        ManualClock(1e6), bulk_mb_s=mb_s, latency_s=latency_s, hot_mb_s=500, prefill=prefill
    )
    match = [ChunkSize(nbytes, 256, tier) for nbytes, tier in sizes]
    assert admission.seconds_per_token == pytest.approx(1 / prefill)
    latencies, speeds = {"bulk": latency_s, "hot": 0.0}, {"bulk": mb_s * MB, "hot": 500 * MB}

    def saved_s(end: int) -> float:
        load = sum(latencies[tier] for tier in {chunk.tier for chunk in match[:end]})
        load += sum(chunk.nbytes / speeds[chunk.tier] for chunk in match[:end])
        return end * 256 / prefill - load

    admitted = admission.admit(match)
    best = max(saved_s(end) for end in range(len(match) + 1))
    assert saved_s(admitted) == pytest.approx(best, abs=1e-6)
