"""The short way of large bodies: the client's connections, endpoint and credentials, but none of
the layers that build a request and copy a body.

Whatever is out of the ordinary raises ``NoAnswer``, and the client's own call follows: it tries
again, follows redirects, and its errors say what is wrong.
"""

import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from urllib3.exceptions import HTTPError

from objkv.stores.s3.http import Answer, Kept, Line, NoAnswer, Unanswered
from objkv.stores.s3.signing import Place, find_place
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


# When a request that is slow to be answered is sent once more: rarely, and late enough.

SAMPLES = 256
SAMPLES_MIN = 20
LATE_MIN_S = 0.01
"""Sooner than this nothing is late: the second request would cost more than it can win."""
_SHARE = 0.95
_REFRESH = 16
_SAVED_MAX = 8.0
"""Hedges that may have been saved up: a store that slows down must not get twice the requests."""


class Hedge:
    """Observes how long answers take to begin. Safe from many threads.

    ``percent_max``: of requests, so many are sent twice; 0 is none.
    """

    def __init__(self, percent_max: int) -> None:
        self._share = percent_max / 100
        self._lock = threading.Lock()
        self._samples: list[float] = []
        self._count = 0
        self._late_s: float | None = None
        self._saved = 0.0

    def observe(self, first_byte_s: float) -> None:
        """Add what one request took from being sent to the first byte of its answer."""
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
        """After how many seconds an answer is late: later than 95 of 100. None while too few are
        known, or no request may be sent twice."""
        return self._late_s

    def take(self) -> bool:
        """Whether one more request may be sent twice; counts it if so."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True


_ANSWERED_EARLY_S = 1.0
"""How long is waited for the answer of a server that stopped taking the request."""
_RELEARN = {301, 307, 308, 400, 401, 403}
"""Answers after which the place is asked for again: another region, other credentials."""


class Watcher(Protocol):
    """Knows which connection its thread is using, so that another can end the use."""

    def attach(self, line: Line) -> None:
        """From now on ``line`` may be shut. Raises ``NoAnswer`` if nothing is wanted any more."""

    def let_go(self) -> None:
        """Nothing of the caller's is touched until the next ``attach``."""


class Wire:
    """Requests for the values of a ``place``, bucket and prefix. Safe from many threads."""

    def __init__(
        self,
        client: "S3Client",
        *,
        place: tuple[str, str],
        hedge: Hedge,
        is_direct: bool,
        recorder: Recorder,
    ) -> None:
        self._client = client
        self._bucket, self._prefix = place
        self._hedge = hedge
        self._recorder = recorder
        settings: Any = client.meta.config
        self._timeout_s = float(settings.read_timeout)
        self._connect_s = float(settings.connect_timeout)
        self._lock = threading.Lock()
        self._kept = Kept()
        self._found: tuple[Place, Any] | None = None
        self._is_missing = not is_direct

    @property
    def is_found(self) -> bool:
        """Whether requests go this way; nothing is sent to find out."""
        return self._find() is not None

    def close(self) -> None:
        """Close the connections; requests go the client's way from now on. Idempotent."""
        with self._lock:
            found, self._found = self._found, None
            self._is_missing = True
        self._kept.close()
        if found is not None:  # closing the client only forgets them
            found[1].close()

    def ask(
        self,
        method: str,
        key: str,
        extra: dict[str, str],
        deadline_s: float,
        *,
        body: Callable[[], memoryview] | None = None,
        watcher: Watcher | None = None,
    ) -> Answer:
        """Send one request and read the head of its answer; the caller closes that.

        ``deadline_s`` is a time of ``time.monotonic``. ``body`` is called once connected and
        watched. A connection that the server had closed is replaced once. Raises ``NoAnswer``.
        """
        found = self._find()
        if found is None:
            raise NoAnswer("the client is needed for every request")
        place, pool = found
        head = place.signed(self._client, method, key, extra)
        request = _Request(head, body, deadline_s)
        for is_fresh in (False, True):
            line = self._borrow(pool, deadline_s, is_fresh=is_fresh, watcher=watcher)
            try:
                answer = self._exchange(line, pool, request)
            except Unanswered:
                if is_fresh or not line.is_used:
                    raise
            else:
                if answer.status in _RELEARN:
                    self._found = None
                return answer
            if watcher is not None:  # the server had closed what nobody used
                watcher.let_go()
        raise AssertionError

    def _find(self) -> tuple[Place, Any] | None:
        found = self._found
        if found is not None or self._is_missing:
            return found
        with self._lock:
            if self._found is None and not self._is_missing:
                place = find_place(self._client, self._bucket, self._prefix)
                pool = None if place is None else _pool_of(self._client, place.url)
                if place is None or pool is None or not place.can_sign(self._client):
                    self._is_missing = True
                else:
                    self._found = place, pool
            return self._found

    def _borrow(
        self, pool: Any, deadline_s: float, *, is_fresh: bool = False, watcher: Watcher | None
    ) -> Line:
        connect_s = min(self._connect_s, deadline_s - time.monotonic())
        if connect_s <= 0:
            raise NoAnswer("the deadline passed")
        connection = None if is_fresh else self._kept.take(pool)
        is_kept = connection is not None
        if connection is None:
            try:
                connection = pool._get_conn()
            except HTTPError as exc:
                self._found = None  # the client has closed it
                raise NoAnswer("no connections") from exc
        if is_fresh:
            connection.close()  # it connects again
        line = Line(pool, connection, timeout_s=self._timeout_s, kept=self._kept)
        try:
            line.connect(connect_s, is_kept=is_kept)
            if watcher is not None:
                watcher.attach(line)
        except BaseException:
            line.release()
            raise
        return line

    def _exchange(self, line: Line, pool: Any, request: "_Request") -> Answer:
        """Send, and read the head of the answer; releases the line if that fails."""
        try:
            if request.body is not None:
                return _put(line, request.head, request.body(), request.deadline_s)
            line.send(request.head, None, request.deadline_s)
            started_s = time.monotonic()
            if line.on_release is None:  # else somebody may have to shut it, and knows just one
                line = self._first_of_two(line, pool, request)
            answer = line.read_head(request.deadline_s)
            self._hedge.observe(time.monotonic() - started_s)
            return answer
        except BaseException:
            line.release()
            raise

    def _first_of_two(self, line: Line, pool: Any, request: "_Request") -> Line:
        """The line whose answer begins first; a second one only if the first is late."""
        late_s = self._hedge.late_s()
        if late_s is None:
            return line
        late_s = min(late_s, request.deadline_s - time.monotonic())
        if _first_readable([line], late_s) or not self._hedge.take():
            return line
        try:
            second = self._borrow(pool, request.deadline_s, watcher=None)
        except NoAnswer:
            return line
        self._recorder.count("s3_hedges")
        try:
            second.send(request.head, None, request.deadline_s)
            wait_s = min(self._timeout_s, request.deadline_s - time.monotonic())
            first = _first_readable([line, second], wait_s)
        except NoAnswer:
            first = None
        except BaseException:
            second.release()
            raise
        loser = line if first is second else second
        loser.release()
        if first is second:
            self._recorder.count("s3_hedge_wins")
            return second
        return line


@dataclass(frozen=True, slots=True)
class _Request:
    head: bytes
    body: Callable[[], memoryview] | None
    deadline_s: float


def _put(line: Line, head: bytes, body: memoryview, deadline_s: float) -> Answer:
    """A server that refuses may answer and close while it is still being sent to."""
    try:
        line.send(head, body, deadline_s)
    except NoAnswer as exc:
        line.early = True
        try:
            answer = line.read_head(min(deadline_s, time.monotonic() + _ANSWERED_EARLY_S))
        except Unanswered:
            raise
        except NoAnswer:
            raise exc from None
    else:
        answer = line.read_head(deadline_s)
    if line.early and answer.status < 300:
        raise NoAnswer("taken before all of it was sent")
    return answer


def _first_readable(lines: list[Line], wait_s: float) -> Line | None:
    poll = select.poll()
    for line in lines:
        poll.register(line.socket, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(max(0, wait_s) * 1000)}
    return next((line for line in lines if line.socket.fileno() in ready), None)


def _pool_of(client: Any, url: str) -> Any:
    """The client's own connections to ``url``, TLS as it wants it; None where this version of the
    client hides them, or a proxy is between."""
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
