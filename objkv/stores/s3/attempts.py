"""How long a call may take, and how often its requests are sent."""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from botocore.exceptions import ClientError, SSLError
from botocore.retries.quota import RetryQuota

from objkv.net.deadline import EndsBy, ends_s, is_trial
from objkv.stores.s3.errors import asks_for_later, error_code, is_busy
from objkv.stores.s3.http import ConnectionFailed

ATTEMPTS = 4
ATTEMPT_SHARE = 0.9 / ATTEMPTS
"""Share of a call's time that an attempt may take. The rest is for the pauses between attempts."""
_NOT_IMPLEMENTED = 501
_PAUSE_S, _BUSY_PAUSE_S = 0.05, 1.0
"""The longest pause before the third attempt, as the client's: it doubles from then on. The second
one does not wait."""
_COST, _BUSY_COST = 14, 5
"""What a repetition takes of the quota, as the client's."""
_LAST_S: ContextVar[float] = ContextVar("last_s", default=math.inf)
T = TypeVar("T")


@contextmanager
def one_call(deadline_s: float) -> Iterator[None]:
    """Bound one call with all its requests and their attempts: it ends within ``deadline_s``
    seconds, or when the caller's time ends, and starts no attempt that may take longer. A call that
    only tests whether the server has recovered makes one attempt."""
    now_s = time.monotonic()
    end_s = min(now_s + deadline_s, ends_s())
    attempt_s = max(0.0, end_s - now_s) * ATTEMPT_SHARE
    token = _LAST_S.set(now_s + attempt_s / 2 if is_trial() else end_s - attempt_s)
    try:
        with EndsBy(end_s):
            yield
    finally:
        _LAST_S.reset(token)


def last_s() -> float:
    """Return the time of ``time.monotonic`` after which this call starts no attempt."""
    return _LAST_S.get()


class Repeater:
    """Sends requests again if that may help: up to ``ATTEMPTS`` times, and less often if the server
    fails for long. Thread-safe."""

    def __init__(self) -> None:
        self._quota = RetryQuota()

    def run(self, attempt: Callable[[], T]) -> T:
        """Return the outcome of ``attempt``, or raise what it raised last."""
        attempts, cost = 0, 1
        while True:
            try:
                outcome = attempt()
            except (ClientError, ConnectionFailed, SSLError) as exc:
                attempts += 1
                cost = self._cost(exc, attempts)
                if not cost:
                    raise
            else:
                self._quota.release(cost)
                return outcome

    def _cost(self, error: Exception, attempts: int) -> int:
        """Pause, and return what the next attempt costs; 0 if there is none."""
        pause_s, cost = _PAUSE_S, _COST
        if isinstance(error, ClientError):
            if not asks_for_later(error) or error_code(error)[0] == _NOT_IMPLEMENTED:
                return 0
            if is_busy(error):
                pause_s, cost = _BUSY_PAUSE_S, _BUSY_COST
        scale = 2 ** (attempts - 2) if attempts > 1 else 0
        is_late = time.monotonic() + scale * _BUSY_PAUSE_S > last_s()
        if attempts == ATTEMPTS or is_late or not self._quota.acquire(cost):
            return 0
        time.sleep(random.random() * pause_s * scale)  # noqa: S311
        return cost
