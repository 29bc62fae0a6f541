"""Reads values into the caller's buffer: a first request, then further ranges in parallel."""

import time
from contextlib import nullcontext, suppress
from itertools import pairwise
from threading import Lock

from botocore.exceptions import ClientError

from objkv.background import Pool
from objkv.errors import StoreError
from objkv.stores.base import Arrived, check_fits
from objkv.stores.s3.attempts import ATTEMPTS, last_s
from objkv.stores.s3.bucket import Bucket
from objkv.stores.s3.errors import error_code
from objkv.stores.s3.http import VALUE_BYTES_MAX, ConnectionFailed, HttpResponse
from objkv.stores.s3.ranges import Range, RangeTeam

PROGRESS_BYTES = 512 << 10
"""``arrived`` is called after each of these many bytes: fewer than a core's cache holds."""
_CLOSE_S = 5.0
"""A thread that is still busy after this ends with its call's deadline, and its result is
discarded."""
_OTHER_RANGE = "the server did not return the requested range"


class S3Reader:
    """Reads the values of ``bucket``. If a response breaks off, only the missing bytes of the same
    version are requested. Raises the client's exceptions and ``StoreError``."""

    def __init__(self, bucket: Bucket, *, range_bytes: int, threads_max: int) -> None:
        """``threads_max``: threads that help callers with values above ``range_bytes``."""
        self.bucket = bucket
        self.range_bytes = range_bytes
        self._threads_max = threads_max
        self._lock = Lock()
        self._pool: Pool[RangeTeam] | None = None

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
        exist. Without ``start``, return the whole value, which must fit.

        The bytes are in ``buffer``, whose length is ``room``, or in memory of their own.
        """
        room = room if buffer is None else len(buffer)
        first, size = start or 0, room
        if buffer is not None and self._threads_max:
            size = min(size, self.range_bytes)
        is_whole = start is None and size == room
        try:
            response = self.bucket.ask("GET", key, {} if is_whole else _range(first, first + size))
        except ClientError as exc:
            if error_code(exc)[0] == 416:  # it starts after the end, so the key exists
                if arrived is not None:
                    arrived(0)
                return memoryview(b"")
            if self.bucket.is_absent(key, exc):
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
            return _Reading(self, key, first, into, response.etag, arrived).run(response)

    def help(self, team: RangeTeam, count: int) -> None:
        """Let up to ``count`` free threads help ``team``. They are started once needed."""
        with self._lock, suppress(RuntimeError):  # the machine may have no more threads
            if self._pool is None:
                self._pool = Pool("objkv-range", self._threads_max, RangeTeam.help)
        if self._pool is not None:
            self._pool.put([team] * min(count, self._threads_max))

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.close(_CLOSE_S)


def _length(response: HttpResponse, start: int, size: int) -> int:
    """Return how many bytes the value has from ``start`` on. The request was for ``size`` of them.
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


class _Reading:
    """One get after the head of its first response."""

    def __init__(
        self,
        reader: S3Reader,
        key: str,
        start: int,
        buffer: memoryview,
        etag: str,
        arrived: Arrived | None,
    ) -> None:
        self._reader, self._key, self._start = reader, key, start
        self._buffer, self._etag, self._arrived = buffer, etag, arrived
        self._reported = -1
        self._ranges: list[Range] = []

    def run(self, response: HttpResponse) -> memoryview:
        """Read all ranges, the first from ``response``, the others together with free threads."""
        end = len(self._buffer)
        first = Range(0, min(response.left, end))
        cuts = [*range(first.end, end, self._reader.range_bytes), end]
        others = [Range(*span) for span in pairwise(cuts)]
        self._ranges = [first, *others]
        with RangeTeam(others, self._complete) as team:
            if others:
                self._reader.help(team, len(others))
            with suppress(ConnectionFailed):
                self._fill(response, first, None)
            self._complete(first, None)
            while (one := team.take()) is not None:
                self._complete(one, None)
            team.wait(self._report)
        if self._arrived is not None and self._reported < end:
            self._arrived(end)
        return self._buffer

    def _report(self) -> None:
        """Call ``arrived`` with the length of the complete prefix, if it has grown enough."""
        if self._arrived is None:
            return
        prefix = 0
        for one in self._ranges:
            prefix = one.at
            if not one.is_done:
                break
        is_all = prefix == len(self._buffer) > self._reported
        if prefix >= self._reported + PROGRESS_BYTES or is_all:
            self._reported = prefix
            self._arrived(prefix)

    def _complete(self, one: Range, team: RangeTeam | None) -> None:
        """Read what is missing of a range, as often as a request is sent, if there is time.
        ``team``: None for the caller itself."""
        problem = "the connection broke off"
        for attempt in range(ATTEMPTS):
            if one.is_done:
                return
            if attempt and time.monotonic() > last_s():
                problem += ", too late to resume before the deadline"
                break
            problem = self._read(one, team)
        if not one.is_done:
            raise ConnectionFailed(problem)

    def _read(self, one: Range, team: RangeTeam | None) -> str:
        """Request the rest of a range. Return why it is not done, or an empty text."""
        first = self._start + one.at
        extra = _range(first, self._start + one.end)
        with self._reader.bucket.ask("GET", self._key, extra) as response:
            is_right = response.left == one.end - one.at and response.starts_at(first)
            if response.status != 206 or not is_right:
                return _OTHER_RANGE
            # ``If-Match`` would do, but servers parse it differently (Ceph 16 expects no quotes).
            if response.etag != self._etag:
                raise ConnectionFailed("the value was replaced during the read")
            with nullcontext() if team is None else team.filling(response):
                try:
                    self._fill(response, one, team)
                except ConnectionFailed as exc:
                    return f"the connection broke off after {one.at} bytes: {exc}"
        return ""

    def _fill(self, response: HttpResponse, one: Range, team: RangeTeam | None) -> None:
        begun = reported = one.at

        def grown(at: int) -> None:
            nonlocal reported
            one.at = begun + at
            if team is None:
                self._report()
            elif one.at >= reported + PROGRESS_BYTES:
                reported = one.at
                team.grew()

        with self._buffer[one.at : one.end] as view:
            response.fill(view, grown)


def _range(start: int, end: int) -> dict[str, str]:
    """Return the header that requests bytes ``[start, end)``."""
    return {"range": f"bytes={start}-{end - 1}"}
