"""Keeps secrets and control characters out of error messages and logs.

objkv writes no secret into a message itself, but its errors include messages of servers, which may
quote a password, and of client libraries, which quote URLs. Code that reads a secret from the
settings registers it here. Every error masks registered secrets in its own message and in those of
its causes, which tracebacks show.
"""

import re
import sys
from typing import Final
from urllib.parse import quote, unquote

KNOWN_MAX: Final = 256
"""How many of the latest secrets are remembered. A process has about a dozen."""
MASK: Final = "***"
_CHARS_MIN = 4
_APART_CHARS = 8
"""Shorter secrets may be common words, so they are masked as whole words only."""
_CHAIN_MAX = 20

_known: dict[str, re.Pattern[str]] = {}
# Signatures and tokens of requests, as servers quote them. The AWS client may have found the
# credentials itself, so they are not registered.
_SIGNED = re.compile(
    r"(?i)(x-amz-security-token\s*[:=]\s*|\bcredential=|\bsignature=)([^\s,;&<\"'/]|/(?!aws4))+"
)


def keep_secret(*values: str | None) -> None:
    """Mask ``values`` from now on, except None and values shorter than 4 characters."""
    for value in values:
        plain = value or ""
        for spelling in {plain, quote(plain, safe="", errors="replace"), unquote(plain)}:
            if len(spelling) < _CHARS_MIN or spelling in _known:
                continue
            text = re.escape(spelling)
            if len(spelling) < _APART_CHARS:
                text = rf"(?<![A-Za-z0-9_]){text}(?![A-Za-z0-9_])"
            while len(_known) >= KNOWN_MAX:
                _known.pop(next(iter(_known), ""), None)
            _known[spelling] = re.compile(text)


def without_secrets(text: str) -> str:
    """Return ``text`` with every secret masked."""
    for pattern in sorted(_known.values(), key=lambda one: -len(one.pattern)):
        text = pattern.sub(MASK, text)
    return _SIGNED.sub(rf"\1{MASK}", text)


def printable(text: str) -> str:
    """Replace control characters and characters that reverse text direction in ``text``: names in a
    store and answers of servers are not trusted. They could forge a line of a log, too."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def hide_in_current_error() -> None:
    """Mask secrets in the message of the exception being handled, and of its causes."""
    error, steps = sys.exception(), 0
    while error is not None and steps < _CHAIN_MAX:
        if any(isinstance(word, str) for word in error.args):
            error.args = tuple(
                without_secrets(word) if isinstance(word, str) else word for word in error.args
            )
        if isinstance(error, OSError) and isinstance(error.strerror, str):
            error.strerror = without_secrets(error.strerror)  # str() shows this, not the args
        error, steps = error.__cause__ or error.__context__, steps + 1


def forget_secrets() -> None:
    """Forget all secrets. For tests, in which the secret of one test is a plain word in another."""
    _known.clear()
