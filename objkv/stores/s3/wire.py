"""Requests for values: signed, sent, hedged if they are late, and repeated if that may help."""

import random
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, SSLError
from botocore.retries.quota import RetryQuota

from objkv.errors import StoreError
from objkv.stores.s3.client import (
    ATTEMPTS,
    CallDeadline,
    S3Access,
    asks_for_later,
    error_code,
    is_busy,
)
from objkv.stores.s3.http import ConnectionFailed, HttpConnection, HttpResponse
from objkv.stores.s3.pieces import Team
from objkv.stores.s3.signing import S3Endpoint, find_endpoint
from objkv.telemetry import Recorder

SAMPLES = 256
SAMPLES_MIN = 20
LATE_MIN_S = 0.01
"""No response is late before this: a second request would cost more than it can win."""
_SHARE = 0.95
_REFRESH = 16
_SAVED_MAX = 8.0
"""Maximum number of unused hedges that accumulate, so that a store that slows down does not get
twice the requests."""
_REDIRECTS = {301, 302, 307}
_REDIRECT_CODES = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
"""Of a bucket in another region than the signature or the endpoint."""
_NOT_IMPLEMENTED = 501
_PAUSE_S, _BUSY_PAUSE_S = 0.05, 1.0
"""The longest pause before the second repetition, as the client's: it doubles from then on."""
_COST, _BUSY_COST = 14, 5
"""What a repetition takes of the quota, as the client's."""


class Hedge:
    """Decides when to send a slow request a second time: rarely, and late enough. Thread-safe.

    At most ``percent_max`` percent of requests are sent twice; 0 disables hedging.
    """

    def __init__(self, percent_max: int) -> None:
        self._share = percent_max / 100
        self._lock = threading.Lock()
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._count = 0
        self.late_s: float | None = None
        """After how many seconds a response is late: slower than p95. None if there are too few
        samples or hedging is disabled."""
        self._saved = 0.0

    def observe(self, first_byte_s: float) -> None:
        """Record the time from sending a request to the first byte of its response."""
        if not self._share:
            return
        with self._lock:
            self._samples.append(first_byte_s)
            self._count += 1
            self._saved = min(_SAVED_MAX, self._saved + self._share)
            if self._count >= SAMPLES_MIN and self._count % _REFRESH == SAMPLES_MIN % _REFRESH:
                ranked = sorted(self._samples)
                self.late_s = max(LATE_MIN_S, ranked[int(_SHARE * (len(ranked) - 1))])

    def take(self) -> bool:
        """Whether another request may be sent twice now; if so, it is counted."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True


class Wire:
    """Requests for the values of a bucket under a prefix. Thread-safe."""

    def __init__(
        self, access: S3Access, place: tuple[str, str], hedge: Hedge, *, recorder: Recorder
    ) -> None:
        """``place`` is bucket and prefix."""
        self._client = access.client
        self._connections = access.connections
        self._place = place
        self._hedge = hedge
        self._recorder = recorder
        self._quota = RetryQuota()
        self._endpoint: S3Endpoint | None = None

    def endpoint(self) -> S3Endpoint:
        """Return where the requests go. Sends nothing. Raises like ``find_endpoint``."""
        found = self._endpoint
        if found is None:
            found = self._endpoint = find_endpoint(self._client, *self._place)
        return found

    def ask(
        self,
        method: str,
        key: str,
        extra: dict[str, str],
        deadline: CallDeadline,
        *,
        body: Callable[[], memoryview] | None = None,
        team: Team | None = None,
    ) -> HttpResponse:
        """Send a request, up to ``ATTEMPTS`` times, and return the head of its response, which the
        caller closes.

        ``body`` is called for each attempt after its connection is made and attached to ``team``;
        requests for a team are neither hedged nor repeated. Raises the client's exceptions;
        ``RetryAttempts`` of a ``ClientError`` counts the attempts before it that the server may
        have carried out.
        """
        lost, cost = 0, 1
        while True:
            try:
                response = self._send(method, key, extra, deadline.end_s, body, team)
                if response.status < 300:
                    self._quota.release(cost)
                    return response
                raise _error(method, response, deadline.end_s, lost + response.is_repeated)
            except (ClientError, ConnectionFailed, SSLError) as exc:
                lost += 1
                cost = 0 if team else self._repetition(exc, lost, deadline)
                if not cost:
                    raise

    def _send(
        self,
        method: str,
        key: str,
        extra: dict[str, str],
        end_s: float,
        body: Callable[[], memoryview] | None,
        team: Team | None,
    ) -> HttpResponse:
        endpoint, sent_s = self.endpoint(), 0.0
        head = endpoint.signed(method, key, extra)

        def race(first: HttpConnection) -> HttpConnection:
            nonlocal sent_s
            sent_s = time.monotonic()
            # The caller can shut a team's connections, and knows of only one for each thread.
            return first if team else self._first_of_two(first, endpoint.url, head, end_s)

        response = self._connections.ask(
            endpoint.url,
            head,
            end_s,
            body=body,
            attach=None if team is None else team.attach,
            race=race,
        )
        if body is None:
            self._hedge.observe(time.monotonic() - sent_s)
        return response

    def _repetition(self, error: Exception, attempt: int, deadline: CallDeadline) -> int:
        """Pause, and return what the repetition costs; 0 if the request is not sent again. The
        first repetition does not wait."""
        if attempt == ATTEMPTS:
            return 0
        pause_s, cost = _PAUSE_S, _COST
        if isinstance(error, ClientError):
            status, code = error_code(error)
            if status in _REDIRECTS or code in _REDIRECT_CODES:
                return int(self._is_elsewhere())
            if not asks_for_later(error) or status == _NOT_IMPLEMENTED:
                return 0
            if is_busy(error):
                pause_s, cost = _BUSY_PAUSE_S, _BUSY_COST
        scale = 2 ** (attempt - 2) if attempt > 1 else 0
        too_late = time.monotonic() + scale * _BUSY_PAUSE_S > deadline.last_s
        if too_late or not self._quota.acquire(cost):
            return 0
        time.sleep(random.random() * pause_s * scale)  # noqa: S311
        return cost

    def _is_elsewhere(self) -> bool:
        """Whether the client has learned that the bucket is in another region: it follows
        redirects, and remembers them."""
        with suppress(BotoCoreError, ClientError, StoreError):
            self._client.head_bucket(Bucket=self._place[0])
        before, self._endpoint = self._endpoint, None
        return self.endpoint() != before

    def _first_of_two(
        self, first: HttpConnection, url: str, head: bytes, deadline_s: float
    ) -> HttpConnection:
        """Return the connection whose response begins first. A second one is used only if the first
        is late."""
        late_s = self._hedge.late_s
        if late_s is None:
            return first
        late_s = min(late_s, deadline_s - time.monotonic())
        if _first_readable([first], late_s) or not self._hedge.take():
            return first
        try:
            second = self._connections.take(url, deadline_s)
        except (ConnectionFailed, SSLError):
            return first
        self._recorder.count("s3_hedges")
        try:
            second.send(head, None, deadline_s)
            wait_s = min(self._connections.read_s, deadline_s - time.monotonic())
            winner = _first_readable([first, second], wait_s)
        except ConnectionFailed:
            winner = None
        except BaseException:
            second.release()
            raise
        if winner is not second:
            second.release()
            return first
        first.release()
        self._recorder.count("s3_hedge_wins")
        return second


def _error(method: str, response: HttpResponse, end_s: float, lost: int) -> ClientError:
    """Close the response, and return its error as the client would."""
    with response:
        text = response.read(end_s).decode(errors="replace")
    found = dict(re.findall(r"<(Code|Message)>([^<]*)</", text))
    answer: Any = {
        "Error": {"Code": str(response.status), "Message": "", **found},
        "ResponseMetadata": {"HTTPStatusCode": response.status, "RetryAttempts": lost},
    }
    return ClientError(answer, method)


def _first_readable(connections: list[HttpConnection], wait_s: float) -> HttpConnection | None:
    poll = select.poll()
    for one in connections:
        poll.register(one.socket, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(max(0, wait_s) * 1000)}
    return next((one for one in connections if one.socket.fileno() in ready), None)
