"""Durations and sizes as people write them: ``30s``, ``2h``, ``7d``, ``10GiB``."""

import re
from decimal import Decimal
from typing import Final

_NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?)"
_DURATION: Final = re.compile(rf"{_NUMBER}\s*(ms|s|m|min|h|d|w)?")
_SIZE: Final = re.compile(rf"{_NUMBER}\s*(?:([KMGTP])(i)?)?B?", re.IGNORECASE)
_SECONDS: Final[dict[str, Decimal | int]] = {
    "ms": Decimal("0.001"),
    "s": 1,
    "m": 60,
    "min": 60,
    "h": 3_600,
    "d": 86_400,
    "w": 604_800,
}
_DIGITS_MAX: Final = 24
"""Longer input is refused before arithmetic on it."""


def parse_duration(text: str) -> Decimal:
    """Return a duration in seconds, exactly. Seconds need no unit. Raises ``ValueError``.

    >>> [float(parse_duration(text)) for text in ("90s", "2h", "1500ms")]
    [90.0, 7200.0, 1.5]
    """
    found = _DURATION.fullmatch(text.strip()) if len(text) <= _DIGITS_MAX else None
    if found is None:
        raise ValueError(
            f"{text[:_DIGITS_MAX]!r} is not a duration; give a number and a unit "
            "(ms, s, m, h, d, w), such as 30s, 2h or 7d"
        )
    return Decimal(found[1]) * _SECONDS[found[2] or "s"]


def parse_size(text: str) -> int:
    """Return a size in bytes. A number without a unit is in bytes. Raises ``ValueError``.

    >>> parse_size("10GiB"), parse_size("1.5 kB"), parse_size("4096")
    (10737418240, 1500, 4096)
    """
    found = _SIZE.fullmatch(text.strip()) if len(text) <= _DIGITS_MAX else None
    if found is None:
        raise ValueError(
            f"{text[:_DIGITS_MAX]!r} is not a size; give bytes or a number and a unit, "
            "such as 512MiB or 10GiB"
        )
    power = 0 if found[2] is None else "KMGTP".index(found[2].upper()) + 1
    return int(Decimal(found[1]) * (1024 if found[3] else 1000) ** power)
