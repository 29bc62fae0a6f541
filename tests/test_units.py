"""Durations and sizes as people write them."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.config import load_config
from objkv.config.units import parse_duration, parse_size
from objkv.errors import ConfigError

DURATIONS = {"30": 30, "30s": 30, "2h": 7200, "7d": 604_800, "1.5m": 90, "250 ms": 0.25}
SIZES = {"0": 0, "10GiB": 10 << 30, "10gib": 10 << 30, "1.5 kB": 1500, "3M": 3_000_000}


@pytest.mark.parametrize(
    ("parse", "known", "others", "name"),
    [
        (
            parse_duration,
            DURATIONS,
            ["", "h", "-1s", "1y", "1e9", "7 days", "nan", "1" * 99],
            "dur",
        ),
        (parse_size, SIZES, ["", "GiB", "-1", "1XB", "1e9", "inf", "9" * 99], "size"),
    ],
)
def test_durations_and_sizes(
    parse: Callable[[str], Any], known: dict[str, float], others: list[str], name: str
) -> None:
    assert {text: parse(text) for text in known} == known
    for text in others:
        with pytest.raises(ValueError, match=f"is not a {name}.*; give .*a number and a unit"):
            parse(text)


@given(st.integers(0, 10**18))
def test_bytes_are_exact(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes


def test_settings_accept_units() -> None:
    given = {"ttl_s": "7d", "load_deadline_ms": "2s", "quota_bytes": "10GiB", "tenant": "9d"}
    config = load_config(given, environ={})
    assert (config.ttl_s, config.load_deadline_ms) == (604_800, 2_000)
    assert (config.quota_bytes, config.tenant) == (10 << 30, "9d")


@given(st.integers(1, 10**7))
def test_whole_milliseconds_are_whole(number: int) -> None:
    given_ms = load_config({"load_deadline_ms": f"{number}ms"}, environ={})
    in_s = load_config({"load_deadline_ms": f"{number / 1000:.3f}s"}, environ={})
    assert given_ms.load_deadline_ms == in_s.load_deadline_ms == number


def test_a_fraction_of_the_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ttl_s.*not a whole number of s"):
        load_config({"ttl_s": "500ms"}, environ={})
