"""Formats numbers and texts for people. An unknown value is a dash, never a zero."""

import re
import time
from datetime import UTC, datetime
from typing import Final

from markupsafe import Markup, escape

from objkv.redact import printable as printable

DASH: Final = "–"
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_COMMAND: Final = re.compile(r"(\bobjkv [a-z]+(?: --[a-z][a-z-]*)*)")
_CENT: Final = 0.01
_SHORT: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def size(nbytes: float | None) -> str:
    """``1.5 MiB``."""
    if nbytes is None:
        return DASH
    value = float(nbytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"


def count(number: float | None) -> str:
    """``12,288``."""
    return DASH if number is None else f"{number:,.0f}"


def brief(number: float | None) -> str:
    """``12.3 k``, for headlines and axes."""
    if number is None:
        return DASH
    for scale, unit in _SHORT:
        if number >= scale:
            value = number / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{number:,.0f}"


def share(part: float | None, whole: float | None) -> str:
    """``41 %``."""
    if part is None or not whole:
        return DASH
    percent = 100 * part / whole
    if 0 < percent < 1:
        return "< 1 %"
    return "> 99 %" if 99 < percent < 100 else f"{percent:.0f} %"


def dollars(amount: float | None) -> str:
    """``$1,234.50``; ``<$0.01`` below a cent and ``$0`` for zero."""
    if amount is None:
        return DASH
    if 0 < amount < _CENT:
        return "<$0.01"
    return f"${amount:,.2f}" if amount else "$0"


def noun(number: float | None, one: str, many: str = "") -> str:
    """Return ``one`` if ``number`` is 1, else ``many``, by default ``one`` with an s."""
    return one if number == 1 else many or f"{one}s"


def span(seconds: float) -> str:
    """``3 d``, in the largest unit that fits."""
    whole = max(0, int(seconds))
    for length, unit in _SPANS:
        if whole >= length:
            return f"{whole // length} {unit}"
    return "0 s"


def duration(seconds: float | None) -> str:
    """``2.4 h``: GPU time, also below 0."""
    if seconds is None:
        return DASH
    for length, unit in ((3_600, "h"), (60, "min")):
        if abs(seconds) >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"


def age(moment_s: float | None, now_s: float | None = None) -> str:
    """``3 d``: how long ago it was."""
    if moment_s is None:
        return DASH
    return span((time.time() if now_s is None else now_s) - moment_s)


def ago(moment_s: int | None, now_s: int) -> str:
    """``3 d ago``."""
    return DASH if moment_s is None else f"{span(now_s - moment_s)} ago"


def moment(moment_s: int | None) -> str:
    """``2026-11-21 22:26 UTC``."""
    if moment_s is None:
        return DASH
    try:
        return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):  # a writer's clock may be wrong
        return DASH


def sentence(text: str) -> str:
    """Return ``text`` with a full stop, and a capital letter unless it starts with a command."""
    whole = text if text.endswith((".", "!", "?")) else f"{text}."
    return whole if whole.startswith("objkv ") else whole[:1].upper() + whole[1:]


def with_commands(text: str) -> Markup:
    """Return ``text`` escaped, with objkv commands marked as code."""
    pieces = _COMMAND.split(printable(text))
    marked = Markup("<code>{}</code>")
    return Markup("").join(
        marked.format(piece) if number % 2 else escape(piece) for number, piece in enumerate(pieces)
    )
