"""Direct requests: they use the client's connections, endpoint and credentials, but skip the layers
that build requests and copy bodies.

Anything unusual raises ``WireFailed``. The caller then uses the client, which retries, follows
redirects and explains errors.
"""

import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from urllib3.exceptions import HTTPError

from objkv.stores.s3.helpers import Helper
from objkv.stores.s3.http import (
    Chunked,
    HttpConnection,
    HttpResponse,
    KeptConnections,
    NoResponse,
    NotSent,
    WireFailed,
)
from objkv.stores.s3.signing import S3Endpoint, find_endpoint
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

SAMPLES = 256
SAMPLES_MIN = 20
LATE_MIN_S = 0.01
"""No response is late before this: a second request would cost more than it can win."""
_SHARE = 0.95
_REFRESH = 16
_SAVED_MAX = 8.0
"""Maximum number of unused hedges that accumulate, so that a store that slows down does not get
twice the requests."""
_ANSWERED_EARLY_S = 1.0
"""How long to wait for the response of a server that stopped reading the request."""
CHUNKED_S = 600.0
"""How long requests of one method go straight to the client after a response to one came in
chunks."""
_RELEARN = {301, 307, 308, 400, 401, 403}
"""Statuses after which the endpoint is looked up again: another region, other credentials."""


class Hedge:
    """Decides when to send a slow request a second time: rarely, and late enough. Thread-safe.

    At most ``percent_max`` percent of requests are sent twice; 0 disables hedging.
    """

    def __init__(self, percent_max: int) -> None:
        self._share = percent_max / 100
        self._lock = threading.Lock()
        self._samples: list[float] = []
        self._count = 0
        self._late_s: float | None = None
        self._saved = 0.0

    def observe(self, first_byte_s: float) -> None:
        """Record the time from sending a request to the first byte of its response."""
        if not self._share:
            return
        with self._lock:
            if len(self._samples) < SAMPLES:
                self._samples.append(first_byte_s)
            else:
                self._samples[self._count % SAMPLES] = first_byte_s
            self._count += 1
            self._saved = min(_SAVED_MAX, self._saved + self._share)
            if self._count >= SAMPLES_MIN and self._count % _REFRESH == SAMPLES_MIN % _REFRESH:
                ranked = sorted(self._samples)
                self._late_s = max(LATE_MIN_S, ranked[int(_SHARE * (len(ranked) - 1))])

    def late_s(self) -> float | None:
        """Return after how many seconds a response is late: slower than p95. None if there are too
        few samples or hedging is disabled."""
        return self._late_s

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
        self,
        client: "S3Client",
        place: tuple[str, str],
        hedge: Hedge,
        *,
        is_direct: bool,
        recorder: Recorder,
    ) -> None:
        """``place`` is bucket and prefix."""
        self._client = client
        self._place = place
        self._hedge = hedge
        self._recorder = recorder
        settings: Any = client.meta.config
        self._timeout_s = float(settings.read_timeout)
        self._connect_s = float(settings.connect_timeout)
        self._lock = threading.Lock()
        self._kept = KeptConnections()
        self._found: tuple[S3Endpoint, Any] | None = None
        self._is_missing = not is_direct
        self._chunked_until_s: dict[str, float] = {}

    @property
    def is_found(self) -> bool:
        """Whether direct requests are possible. Sends nothing."""
        return self._find() is not None

    def close(self) -> None:
        """Close the connections; later requests use the client. Idempotent."""
        with self._lock:
            found, self._found = self._found, None
            self._is_missing = True
        self._kept.close()
        if found is not None:  # closing the client does not close them
            found[1].close()

    def ask(
        self,
        method: str,
        key: str,
        extra: dict[str, str],
        deadline_s: float,
        *,
        body: Callable[[], memoryview] | None = None,
        helper: Helper | None = None,
    ) -> HttpResponse:
        """Send one request and read the head of its response, which the caller closes.

        ``deadline_s`` is a time of ``time.monotonic``. ``body`` is called after the connection is
        made and attached to ``helper``; a helper's requests are not hedged. If the server had
        closed the connection, it is replaced once. Raises ``WireFailed``.
        """
        found = self._find()
        if found is None:
            raise NotSent("direct requests are not possible")
        if self._chunked_until_s and time.monotonic() < self._chunked_until_s.get(method, 0.0):
            raise NotSent("the server responds in chunks")
        endpoint, pool = found
        head = endpoint.signed(self._client, method, key, extra)
        for is_fresh in (False, True):
            connection = self._borrow(pool, deadline_s, is_fresh=is_fresh, helper=helper)
            was_used = connection.is_used
            try:
                if body is not None:
                    response = _put(connection, head, body(), deadline_s)
                else:
                    connection.send(head, None, deadline_s)
                    sent_s = time.monotonic()
                    if (
                        helper is None
                    ):  # other threads can shut a helper's connection, and they know of only one
                        connection = self._first_of_two(connection, pool, head, deadline_s)
                    response = connection.read_head(deadline_s)
                    self._hedge.observe(time.monotonic() - sent_s)
            except NoResponse:
                connection.release()
                if is_fresh or not was_used:
                    raise
            except Chunked:
                self._chunked_until_s[method] = time.monotonic() + CHUNKED_S
                connection.release()
                raise
            except BaseException:
                connection.release()
                raise
            else:
                if response.status in _RELEARN:
                    self._found = None
                response.is_repeated = is_fresh
                return response
            if helper is not None:  # the server had closed an idle connection
                helper.let_go()
        raise AssertionError

    def _find(self) -> tuple[S3Endpoint, Any] | None:
        found = self._found
        if found is not None or self._is_missing:
            return found
        with self._lock:
            if self._found is None and not self._is_missing:
                endpoint = find_endpoint(self._client, *self._place)
                pool = None if endpoint is None else _pool_of(self._client, endpoint.url)
                if endpoint is None or pool is None or not endpoint.can_sign(self._client):
                    self._is_missing = True
                else:
                    self._found = endpoint, pool
            return self._found

    def _borrow(
        self, pool: Any, deadline_s: float, *, is_fresh: bool = False, helper: Helper | None = None
    ) -> HttpConnection:
        connect_s = min(self._connect_s, deadline_s - time.monotonic())
        if connect_s <= 0:
            raise WireFailed("the deadline passed")
        borrowed = None if is_fresh else self._kept.take(pool)
        is_kept = borrowed is not None
        if borrowed is None:
            try:
                borrowed = pool._get_conn()
            except HTTPError as exc:
                self._found = None  # the client has closed the pool
                raise WireFailed("no connections") from exc
        if is_fresh:
            borrowed.close()  # it connects again
        connection = HttpConnection(pool, borrowed, timeout_s=self._timeout_s, kept=self._kept)
        try:
            connection.connect(connect_s, is_kept=is_kept)
            if helper is not None:
                helper.attach(connection)
        except BaseException:
            connection.release()
            raise
        return connection

    def _first_of_two(
        self, first: HttpConnection, pool: Any, head: bytes, deadline_s: float
    ) -> HttpConnection:
        """Return the connection whose response begins first. A second one is used only if the first
        is late."""
        late_s = self._hedge.late_s()
        if late_s is None:
            return first
        late_s = min(late_s, deadline_s - time.monotonic())
        if _first_readable([first], late_s) or not self._hedge.take():
            return first
        try:
            second = self._borrow(pool, deadline_s)
        except WireFailed:
            return first
        self._recorder.count("s3_hedges")
        try:
            second.send(head, None, deadline_s)
            wait_s = min(self._timeout_s, deadline_s - time.monotonic())
            winner = _first_readable([first, second], wait_s)
        except WireFailed:
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


def _put(
    connection: HttpConnection, head: bytes, body: memoryview, deadline_s: float
) -> HttpResponse:
    """Send a request with a body. A server that refuses it may respond and close the connection
    early."""
    try:
        connection.send(head, body, deadline_s)
    except WireFailed as exc:
        connection.early = True
        try:
            response = connection.read_head(min(deadline_s, time.monotonic() + _ANSWERED_EARLY_S))
        except NoResponse:
            raise
        except WireFailed:
            raise exc from None
    else:
        response = connection.read_head(deadline_s)
    if connection.early and response.status < 300:
        raise WireFailed("the server responded before the whole body was sent")
    return response


def _first_readable(connections: list[HttpConnection], wait_s: float) -> HttpConnection | None:
    poll = select.poll()
    for one in connections:
        poll.register(one.socket, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(max(0, wait_s) * 1000)}
    return next((one for one in connections if one.socket.fileno() in ready), None)


def _pool_of(client: Any, url: str) -> Any:
    """Return the client's own connection pool for ``url``, with its TLS settings. None if this
    version of the client hides it, or if a proxy is in use."""
    try:
        session = client._endpoint.http_session
        if session._proxy_config.proxy_url_for(url):
            return None
        pool = session._get_connection_manager(url).connection_from_url(url)
        session._setup_ssl_cert(pool, url, session._verify)
        for name in ("_get_conn", "_put_conn", "_validate_conn"):
            getattr(pool, name)
    except (AttributeError, TypeError):
        return None
    return pool
