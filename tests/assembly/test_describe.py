"""Facts about a server, as far as tests need no real one."""

from unittest.mock import Mock

import pytest
import redis

from objkv.assembly.redis import describe_redis

ASKED_S, ANSWERED_S = 1_000.0, 1_030.0


@pytest.mark.parametrize(
    ("told", "skew_s"),
    [((990, 0), -10.0), ((1_000, 0), 0.0), ((1_029, 500_000), 0.0), ((1_031, 500_000), 1.5)],
)
def test_an_answer_that_is_late_is_no_wrong_clock(told: tuple[int, int], skew_s: float) -> None:
    server = Mock(redis.Redis)
    server.info.return_value = {}
    server.time.return_value = told
    facts = describe_redis(server, clock=iter([ASKED_S, ANSWERED_S]).__next__)
    assert facts.clock_skew_s == skew_s
