"""Reads values into the caller's buffer: a first request, then further ranges in parallel."""

from collections import deque
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from itertools import pairwise
from threading import Condition, Lock, get_ident
from time import monotonic

from botocore.exceptions import ClientError

from objkv.background import Pool
from objkv.errors import StoreError, StoreUnavailable
from objkv.net.deadline import ends_s
from objkv.stores.base import Arrived, check_fits
from objkv.stores.s3.bucket import Bucket
from objkv.stores.s3.client import ATTEMPTS, last_s
from objkv.stores.s3.errors import error_code
from objkv.stores.s3.http import STEP_BYTES, VALUE_BYTES_MAX, ConnectionFailed, HttpResponse

PART_STEP_BYTES = 512 << 10
"""``arrived`` is called after each of these many bytes of a part of a value, which a forward pass
may wait for layer by layer; of a whole value, after ``STEP_BYTES``."""
_CLOSE_S = 5.0
"""A thread that is still busy after this ends with its call's deadline."""
_OTHER_RANGE = "the server did not return the requested range"


class S3Reader:
    """Reads the values of ``bucket``. If a response breaks off, only the missing bytes of the same
    version are requested. Raises the client's exceptions and ``StoreError``."""

    def __init__(self, bucket: Bucket, *, range_bytes: int, threads_max: int) -> None:
        """``threads_max``: threads that help callers with values above ``range_bytes``."""
        self._bucket = bucket
        self._range_bytes = range_bytes
        self._threads_max = threads_max
        self._lock = Lock()
        self._pool: Pool[RangedGet] | None = None

    def read(
        self,
        key: str,
        start: int | None = None,
        *,
        buffer: memoryview | None = None,
        room: int = VALUE_BYTES_MAX,
        arrived: Arrived | None = None,
    ) -> memoryview | None:
        """Return up to ``room`` bytes of the value from ``start`` on, or None if the key does not
        exist. Without ``start``, return the whole value, which must fit. The bytes are in
        ``buffer``, whose length replaces ``room``, or in memory of their own."""
        room = room if buffer is None else len(buffer)
        first, size = start or 0, room
        if buffer is not None and self._threads_max:
            size = min(size, self._range_bytes)
        is_whole = start is None and size == room
        try:
            response = self._bucket.ask("GET", key, {} if is_whole else _range(first, first + size))
        except ClientError as exc:
            if error_code(exc)[0] == 416:  # it starts after the end, so the key exists
                if arrived is not None:
                    arrived(0)
                return memoryview(b"")
            if self._bucket.is_absent(key, exc):
                return None
            raise
        with response:
            nbytes = _length(response, first, size)
            if start is None and buffer is not None:
                check_fits(key, nbytes, buffer)
            elif start is None and nbytes > room:
                raise StoreError(f"the server returned {nbytes} bytes, more than {room}")
            nbytes = min(nbytes, room)
            into = memoryview(bytearray(nbytes)) if buffer is None else buffer[:nbytes]
            cuts = [0, *range(min(response.left, nbytes), nbytes, self._range_bytes), nbytes]
            get = RangedGet(self._bucket, key, start, into, cuts, response.etag, arrived)
            if len(cuts) > 2:
                self._help(get, len(cuts) - 2)
            get.run(response)
            return into

    def _help(self, get: "RangedGet", count: int) -> None:
        """Let up to ``count`` free threads read ranges."""
        with self._lock, suppress(RuntimeError):  # the machine may have no more threads
            if self._pool is None:
                self._pool = Pool("objkv-range", self._threads_max, RangedGet.help)
        if self._pool is not None:
            self._pool.put([get] * min(count, self._threads_max))

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.close(_CLOSE_S)


def _length(response: HttpResponse, start: int, size: int) -> int:
    """Return how many bytes the value has from ``start`` on, of which ``size`` were requested.
    Raises for a response that must not be written to a buffer."""
    if response.status not in (200, 206):
        raise ConnectionFailed(f"HTTP {response.status} instead of a value")
    is_range = response.status == 206
    if is_range and not (response.left <= size and response.starts_at(start)):
        raise ConnectionFailed(_OTHER_RANGE)
    if start and not is_range:
        raise ConnectionFailed("the server ignores ranges")
    nbytes = max(0, response.total - start)
    if response.left > nbytes:
        raise ConnectionFailed("the server returned a range that extends past the end")
    return nbytes


def _range(start: int, end: int) -> dict[str, str]:
    return {"range": f"bytes={start}-{end - 1}"}


@dataclass(slots=True)
class Range:
    """Bytes ``[at, end)`` of a buffer, which are still missing."""

    at: int
    end: int


class RangedGet:
    """One get after the head of its first response: its caller and free threads read the ranges.
    Once ``run`` has ended, no thread touches the caller's buffer."""

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        start: int | None,
        buffer: memoryview,
        cuts: list[int],
        etag: str,
        arrived: Arrived | None,
    ) -> None:
        """``start``: None for a whole value. ``cuts``: where the ranges of ``buffer`` begin, and
        its end. ``etag``: the version of the value."""
        self._bucket, self._key, self._start = bucket, key, start or 0
        self._buffer, self._etag, self._arrived = buffer, etag, arrived
        self._step_bytes = STEP_BYTES if start is None else PART_STEP_BYTES
        self._ranges = [Range(*span) for span in pairwise(cuts)]
        self._caller, self._context = get_ident(), copy_context()  # it has the call's deadlines
        self._changed = Condition()
        self._pending = deque(self._ranges[1:])
        self._working = 0
        """Ranges that threads have started and not ended."""
        self._filling: list[HttpResponse] = []
        self._error: Exception | None = None
        self._is_over = False
        self._reported = -1

    def run(self, response: HttpResponse) -> None:
        """Read all ranges, the first one from ``response``."""
        try:
            with suppress(ConnectionFailed):
                self._fill(response, self._ranges[0])
            self._complete(self._ranges[0])
            self._work()
            self._wait()
            if self._arrived is not None and self._reported < len(self._buffer):
                self._arrived(len(self._buffer))
        finally:
            self._await_readers()

    def help(self) -> None:
        """Read ranges until none is left: the job of a thread of a pool."""
        self._context.copy().run(self._work)

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._is_over or self._error is not None or not self._pending:
                    return
                self._working += 1
                one, error = self._pending.popleft(), None
            try:
                self._complete(one)
            except Exception as exc:
                error = exc.with_traceback(None)  # whose frames hold the buffer
            with self._changed:
                self._working -= 1
                self._error = self._error or error
                self._changed.notify_all()

    def _wait(self) -> None:
        """Report what the other threads read, until they end. Raises what they raised."""
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if not self._working:
                    return
                left_s = ends_s() - monotonic()
                if left_s <= 0:
                    raise StoreUnavailable("the deadline passed before all ranges were read")
                self._changed.wait(left_s)
            self._report()

    def _await_readers(self) -> None:
        """Wait until no thread touches the buffer. Jobs that have not started must not keep it."""
        with self._changed:
            self._is_over = True
            for response in self._filling:
                response.shut()
            while self._filling:
                self._changed.wait()
            self._buffer, self._arrived, self._error = memoryview(b""), None, None

    def _report(self) -> None:
        """Call ``arrived`` with the length of the complete prefix, if it has grown enough."""
        if self._arrived is not None:
            unfinished = (one.at for one in self._ranges if one.at < one.end)
            prefix = next(unfinished, len(self._buffer))
            if prefix >= self._reported + self._step_bytes:
                self._reported = prefix
                self._arrived(prefix)

    def _complete(self, one: Range) -> None:
        """Read what is missing of a range, with as many attempts as a request, if there is time."""
        problem = "the connection broke off"
        for attempt in range(ATTEMPTS):
            if one.at == one.end or self._is_over:
                return
            if attempt and monotonic() > last_s():
                problem += ", too late to resume before the deadline"
                break
            problem = self._read(one)
        if one.at < one.end:
            raise ConnectionFailed(problem)

    def _read(self, one: Range) -> str:
        """Request the rest of a range. Return why it is not done, or an empty text."""
        first = self._start + one.at
        extra = _range(first, self._start + one.end)
        with self._bucket.ask("GET", self._key, extra) as response:
            is_right = response.left == one.end - one.at and response.starts_at(first)
            if response.status != 206 or not is_right:
                return _OTHER_RANGE
            # ``If-Match`` would do, but servers parse it differently (Ceph 16 expects no quotes).
            if response.etag != self._etag:
                raise ConnectionFailed("the value was replaced during the read")
            try:
                self._fill(response, one)
            except ConnectionFailed as exc:
                return f"the connection broke off after {one.at} bytes: {exc}"
        return ""

    def _fill(self, response: HttpResponse, one: Range) -> None:
        begun = one.at

        def grown(at: int) -> None:
            one.at = begun + at
            if get_ident() == self._caller:
                self._report()
            elif one.at < one.end:  # ``_work`` reports its end
                with self._changed:
                    self._changed.notify_all()

        with self._changed:
            if self._is_over:
                return
            self._filling.append(response)
        try:
            with self._buffer[one.at : one.end] as view:
                response.fill(view, grown, self._step_bytes)
        finally:
            with self._changed:
                self._filling.remove(response)
                self._changed.notify_all()
