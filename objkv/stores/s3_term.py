"""When one call on S3 has to be over, and until when it may ask once more."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

from objkv.sockets import ends_s, is_trial
from objkv.stores.s3_client import begun_by

_ATTEMPT_SHARE = 1 / 4
"""Of the time there is, at most: where that is short an attempt is cut off rather than not made."""
_ABORT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Term:
    """Times of ``time.monotonic``."""

    end_s: float
    last_s: float
    """No attempt of the client begins later."""
    abort_s: float
    """An upload that is not over by then is aborted, which takes time as well."""

    def client(self) -> AbstractContextManager[None]:
        """What the client does inside is begun, and ends, in time."""
        return begun_by(self.last_s, self.end_s)


def open_term(deadline_s: float, attempt_s: float) -> Term:
    """Of a call that begins now: ``deadline_s`` seconds, or fewer where the caller has fewer.

    One attempt takes up to ``attempt_s``. A call that only tries whether the server is back asks
    once, and is done when that was not answered.
    """
    now_s = time.monotonic()
    end_s = min(now_s + deadline_s, ends_s())
    left_s = max(0.0, end_s - now_s)
    attempt_s = min(attempt_s, left_s * _ATTEMPT_SHARE)
    last_s = now_s + attempt_s / 2 if is_trial() else end_s - attempt_s
    return Term(end_s, last_s, end_s - left_s * _ABORT_SHARE)
