"""Keeps secrets out of error messages and logs.

objkv writes no secret into a message. But servers quote input that they do not understand,
passwords included, and client libraries quote URLs; their words go into errors and logs. Code that
reads a secret from settings therefore registers it here, and every error masks it: in its own
message, and in those of the errors that caused it, which tracebacks show.
"""

import re
import sys
from typing import Final
from urllib.parse import quote, unquote

KNOWN_MAX: Final = 256
"""Secrets that are remembered, the latest: a process has a dozen."""
MASK: Final = "***"
_CHARS_MIN = 4
_APART_CHARS = 8
"""Shorter ones are common words: they are looked for as words, not as parts of others."""
_CHAIN_MAX = 20

_known: dict[str, re.Pattern[str]] = {}
# What signs a request, as servers quote it: also where the AWS client found it by itself.
_SIGNED = re.compile(
    r"(?i)(x-amz-security-token\s*[:=]\s*|\bcredential=|\bsignature=)([^\s,;&<\"'/]|/(?!aws4))+"
)


def keep_secret(*values: str | None) -> None:
    """Mask ``values`` from now on, except None and values too short to be distinguished from
    words."""
    for value in values:
        for spelling in {value or "", quote(value or "", safe=""), unquote(value or "")}:
            if len(spelling) < _CHARS_MIN or spelling in _known:
                continue
            text = re.escape(spelling)
            if len(spelling) < _APART_CHARS:
                text = rf"(?<![A-Za-z0-9_]){text}(?![A-Za-z0-9_])"
            while len(_known) >= KNOWN_MAX:
                _known.pop(next(iter(_known), ""), None)
            _known[spelling] = re.compile(text)


def without_secrets(text: str) -> str:
    """``text`` with a mask in place of every secret."""
    for pattern in sorted(_known.values(), key=lambda one: -len(one.pattern)):
        text = pattern.sub(MASK, text)
    return _SIGNED.sub(rf"\1{MASK}", text)


def hide_in_current_error() -> None:
    """Mask secrets in the message of the exception being handled, and of its causes."""
    error, steps = sys.exception(), 0
    while error is not None and steps < _CHAIN_MAX:
        if any(isinstance(word, str) for word in error.args):
            error.args = tuple(
                without_secrets(word) if isinstance(word, str) else word for word in error.args
            )
        if isinstance(error, OSError) and isinstance(error.strerror, str):
            error.strerror = without_secrets(error.strerror)  # what it shows, whatever its args
        error, steps = error.__cause__ or error.__context__, steps + 1


def forget_secrets() -> None:
    """For tests: the secrets of one test are words in another."""
    _known.clear()
