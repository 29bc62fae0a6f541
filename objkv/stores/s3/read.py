"""Reads values into the caller's buffer: a first request, then further ranges in parallel."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from objkv.errors import StoreUnavailable
from objkv.stores.base import Arrived, check_fits, copy_into
from objkv.stores.s3.absent import Absence
from objkv.stores.s3.body import VALUE_BYTES_MAX, read_all, read_exactly
from objkv.stores.s3.client import CallDeadline, error_code
from objkv.stores.s3.helpers import Helper, HelperPool, Piece, Team
from objkv.stores.s3.http import HttpResponse, WireFailed, strong_tag
from objkv.stores.s3.wire import Wire

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PROGRESS_BYTES = 512 << 10
"""``arrived`` is called after each of these many bytes: fewer than a core's cache holds."""


@dataclass(frozen=True, slots=True)
class Get:
    """One get: the value, the start position and the target buffer."""

    place: dict[str, Any]
    """Bucket and key as the client's arguments."""
    key: str
    start: int | None
    """Position in the value. None requests the whole value, which must fit in the buffer."""
    buffer: memoryview
    arrived: Arrived | None
    deadline: CallDeadline


class S3Reader:
    """Reads on a ``Wire``.

    A request that fails before the first byte raises ``WireFailed``, and the caller repeats the get
    through the client. If the response breaks off later, only the missing bytes of the same version
    are requested: once on the wire, then by the client if time is left.
    """

    def __init__(
        self,
        client: "S3Client",
        wire: Wire,
        pool: HelperPool,
        *,
        range_bytes: int,
    ) -> None:
        self.client: Any = client
        self.absence = Absence(client)
        self.wire = wire
        self.pool = pool
        self.range_bytes = range_bytes

    def get(
        self,
        place: dict[str, Any],
        deadline: CallDeadline,
        start: int | None = None,
        end: int = 0,
    ) -> bytes | None:
        """Return the whole value, or its non-empty range ``[start, end)``, read by the client.
        Raises the client's exceptions, like ``read_by_client``."""
        asked = {} if start is None else {"Range": _range(start, end)["range"]}
        with deadline.client():
            try:
                answer = self.client.get_object(**place, **asked)
            except ClientError as exc:
                if start is not None and error_code(exc)[0] == 416:
                    return b""  # the range starts after the end, so the key exists
                if self.absence.is_absent(place, exc):
                    return None
                raise
            self.absence.note_read(place)
            is_part = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
            nbytes_max = end - start if is_part and start is not None else VALUE_BYTES_MAX
            value = read_all(answer, deadline.end_s, nbytes_max)
        return value if start is None or is_part else value[start:end]

    def read(self, get: Get) -> int | None:
        """Return the number of bytes read, or None if the key does not exist. Raises
        ``WireFailed``, and ``StoreUnavailable`` if a response broke off and could not be completed.
        """
        size, start, end_s = len(get.buffer), get.start or 0, get.deadline.end_s
        is_split = self.pool.threads_max > 0 and size > self.range_bytes
        if is_split:
            size = self.range_bytes
        extra = {} if get.start is None and not is_split else _range(start, start + size)
        with self.wire.ask("GET", get.key, extra, end_s) as response:
            if response.status == 404 and b"<Code>NoSuchKey</Code>" in response.text(end_s):
                return None
            reading = _Reading(self, get, response, _length(get, response, size))
            if reading.is_single:
                with suppress(WireFailed), get.buffer[: response.left] as view:
                    response.fill(view, end_s, reading.first_grew)
            else:
                reading.run(response)
            nbytes = reading.finish()
        self.absence.note_read(get.place)
        return nbytes

    def read_by_client(self, get: Get) -> int | None:
        """Read with the client, which retries, follows redirects and explains errors. Calls
        ``arrived`` once, at the end."""
        if get.start is not None:
            end = get.start + len(get.buffer)
            value = self.get(get.place, get.deadline, get.start, end)
            if value is None:
                return None
            return copy_into(get.key, value, get.buffer, get.arrived)
        with get.deadline.client():
            try:
                answer = self.client.get_object(**get.place)
            except ClientError as exc:
                if self.absence.is_absent(get.place, exc):
                    return None
                raise
            self.absence.note_read(get.place)
            if answer.get("ContentLength") is None:  # sent in chunks
                value = read_all(answer, get.deadline.end_s)
                return copy_into(get.key, value, get.buffer, get.arrived)
            with _closed_on_error(answer["Body"]) as body:
                nbytes = int(answer["ContentLength"])
                check_fits(get.key, nbytes, get.buffer)
                read_exactly(body, get.buffer[:nbytes], get.deadline.end_s)
        if get.arrived is not None:
            get.arrived(nbytes)
        return nbytes


@contextmanager
def _closed_on_error(body: Any) -> Iterator[Any]:
    """Close ``body`` on an error: a connection with unread bytes cannot be reused."""
    try:
        yield body
    except BaseException:
        body.close()
        raise


def _length(get: Get, response: HttpResponse, size: int) -> int:
    """Return how many bytes of the value belong to ``get``, whose first request was for ``size``
    bytes. Raises ``WireFailed`` for a response that must not be written to the buffer."""
    start, room = get.start or 0, len(get.buffer)
    if response.status not in (200, 206) or (response.status == 200 and start):
        raise WireFailed(f"HTTP {response.status}")
    if response.status == 206 and not (response.left <= size and response.starts_at(start)):
        raise WireFailed("a different range than requested")
    nbytes = response.total - start
    if response.left > nbytes:
        raise WireFailed("a range that extends past the end")
    if response.left < min(nbytes, room) and not response.etag:
        raise WireFailed("ranges of an unknown version")
    if get.start is None:
        check_fits(get.key, nbytes, get.buffer)
    elif response.status == 200 and response.left > room:
        raise WireFailed("a server without range support")
    return min(nbytes, room)


class _Reading:
    """One get after the head of its first response."""

    def __init__(self, reader: S3Reader, get: Get, response: HttpResponse, nbytes: int) -> None:
        self._reader = reader
        self._get = get
        self._nbytes = nbytes
        self._start = get.start or 0
        self._etag = response.etag
        self._reported = -1
        cuts = [*range(response.left, nbytes, reader.range_bytes), nbytes]
        self._first = Piece(0, response.left)
        self._pieces = [self._first, *(Piece(start, end) for start, end in pairwise(cuts))]

    @property
    def is_single(self) -> bool:
        """Whether the first response holds all of it."""
        return len(self._pieces) == 1

    def first_grew(self, at: int) -> None:
        """Record and report how many bytes of the first response have arrived."""
        self._first.at = at
        self._report()

    def run(self, response: HttpResponse) -> None:
        """Read all pieces, the first from ``response``, together with free helpers."""
        get = self._get
        with Team(self._reader.pool, self._pieces[1:], self._read) as team:
            with suppress(WireFailed), get.buffer[: self._first.end] as view:
                response.fill(view, get.deadline.end_s, self.first_grew)
            while (piece := team.take()) is not None:
                try:
                    self._read(piece, None)
                except WireFailed:
                    continue
                self._report()
            team.wait(get.deadline.end_s, self._report)

    def finish(self) -> int:
        """Request the missing bytes once more, and report completion."""
        for piece in self._pieces:
            if not piece.is_done:
                self._complete(piece)
                self._report()
        if self._get.arrived is not None and self._reported < self._nbytes:
            self._get.arrived(self._nbytes)
        return self._nbytes

    def _report(self) -> None:
        """Call ``arrived`` with the length of the complete prefix, if it has grown enough."""
        if self._get.arrived is None:
            return
        prefix = 0
        for piece in self._pieces:
            prefix = piece.at
            if not piece.is_done:
                break
        if prefix >= self._reported + PROGRESS_BYTES or prefix == self._nbytes > self._reported:
            self._reported = prefix
            self._get.arrived(prefix)

    def _read(self, piece: Piece, helper: Helper | None) -> None:
        get = self._get
        first, end_s = self._start + piece.at, get.deadline.end_s
        extra = _range(first, self._start + piece.end)
        begun = reported = piece.at

        def grown(at: int) -> None:
            nonlocal reported
            piece.at = begun + at
            if helper is None:
                self._report()
            elif piece.at >= reported + PROGRESS_BYTES:
                reported = piece.at
                helper.grew()

        with self._reader.wire.ask("GET", get.key, extra, end_s, helper=helper) as response:
            is_right = response.left == piece.end - piece.at and response.starts_at(first)
            if response.status != 206 or not is_right:
                raise WireFailed(f"HTTP {response.status}")
            self._check_version(response.etag)
            response.fill(get.buffer[piece.at : piece.end], end_s, grown)

    def _complete(self, piece: Piece) -> None:
        """Read the rest of ``piece``, through the client if necessary."""
        with suppress(WireFailed):
            self._read(piece, None)
            return
        get = self._get
        if time.monotonic() > get.deadline.last_s:
            raise StoreUnavailable(
                f"get_into {get.key}: the connection broke off after {piece.at} of "
                f"{self._nbytes} bytes, too late to resume before the deadline"
            )
        asked = _range(self._start + piece.at, self._start + piece.end)["range"]
        with get.deadline.client():
            answer = self._reader.client.get_object(**get.place, Range=asked)
            with _closed_on_error(answer["Body"]) as body:
                self._check_version(strong_tag(answer.get("ETag", "")))
                starts = f"bytes {self._start + piece.at}-"
                is_right = answer.get("ContentRange", "").startswith(starts)
                if not is_right or answer.get("ContentLength") != piece.end - piece.at:
                    raise StoreUnavailable(
                        f"get_into {get.key}: the connection broke off, and the server did "
                        "not return the requested range"
                    )
                read_exactly(body, get.buffer[piece.at : piece.end], get.deadline.end_s)
        piece.at = piece.end

    def _check_version(self, etag: str) -> None:
        """Compare versions here. ``If-Match`` would do, but servers parse it differently (Ceph 16
        expects no quotes)."""
        if not etag or etag != self._etag:
            how = (
                "the value was replaced during the read"
                if etag
                else ("the connection broke off, and the server sent no version")
            )
            raise StoreUnavailable(f"get_into {self._get.key}: {how}")


def _range(start: int, end: int) -> dict[str, str]:
    """Return the header that requests bytes ``[start, end)``."""
    return {"range": f"bytes={start}-{end - 1}"}
