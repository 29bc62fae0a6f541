"""Reads values into the caller's buffer: a first request, then further ranges in parallel."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from objkv.config import is_directory_bucket
from objkv.errors import StoreError
from objkv.stores.base import Arrived, check_fits
from objkv.stores.s3.client import ATTEMPTS, CallDeadline, error_code, is_missing
from objkv.stores.s3.http import STEP_BYTES, VALUE_BYTES_MAX, ConnectionFailed, HttpResponse
from objkv.stores.s3.pieces import HelperPool, Piece, Team
from objkv.stores.s3.wire import Wire

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LIST_AGAIN_S = 15.0
"""How long a refused listing is not repeated: short, so that misses are misses again soon after
revoked rights return."""
_PAYLOAD = ".safetensors"
PROOF_S = 300.0
"""How long a successful read proves that this process may read."""
PROGRESS_BYTES = 512 << 10
"""``arrived`` is called after each of these many bytes: fewer than a core's cache holds."""
_OTHER_RANGE = "the server did not return the requested range"


class Absence:
    """Whether a refusal (403) means that a key does not exist. Thread-safe.

    S3 returns 404 for a missing key to anyone with permission to list, and 403 to all others. See
    decision 31. The keys of one store are all under one prefix.

    If the permission to list has a condition on the prefix, some servers (Ceph 16.2) return 403,
    because a get names no prefix. Servers that honour the condition allow a listing of this one
    key, which decides at the cost of one more request. Directory buckets cannot list single keys,
    but their sessions may list everything, so a missing key is always a 404.

    A role that may not list at all gets 403 for each miss. It is a miss while a read of another key
    of the store is at most ``PROOF_S`` old; then that key is read again. Without such a proof the
    403 stays a refusal: it may just as well mean that the role may not read. So does the 403 of a
    payload.
    """

    def __init__(self, client: "S3Client", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client: Any = client
        self._clock = clock
        self._list_again_s = 0.0
        self._read: tuple[dict[str, Any], float] | None = None
        """The place that was read last, and when."""

    def note_read(self, place: dict[str, Any]) -> None:
        """Remember that ``place``, bucket and key, was just read."""
        self._read = place, self._clock()

    def is_absent(self, place: dict[str, Any], error: ClientError) -> bool:
        """Whether ``error``, the response to a request for ``place``, means that the key does not
        exist. Raises the client's exceptions other than ``ClientError``.

        Only a listing proves that a payload is missing, never a read of another key: readers forget
        the record of a missing payload, and after rights are revoked a fleet would forget all that
        it has stored.
        """
        if is_missing(error):
            return True
        status, code = error_code(error)
        if status != 403 or code not in ("AccessDenied", "403", "Forbidden"):
            return False  # the response to a HEAD has no S3 code
        is_payload = place["Key"].endswith(_PAYLOAD)
        if is_directory_bucket(place["Bucket"]):
            return False
        if self._clock() < self._list_again_s:
            return not is_payload and (self._is_proven() or self._reads_again())
        try:
            page = self._client.list_objects_v2(
                Bucket=place["Bucket"], Prefix=place["Key"], MaxKeys=1
            )
        except ClientError as exc:
            if error_code(exc)[0] != 403:
                return False
            proven = not is_payload and (self._is_proven() or self._reads_again())
            self._list_again_s = self._clock() + (PROOF_S if proven else LIST_AGAIN_S)
            return proven
        # Listings are ordered, so the key itself would be the first of all keys that start with it.
        return all(found["Key"] != place["Key"] for found in page.get("Contents", ()))

    def head(self, place: dict[str, Any]) -> Any | None:
        """Return the client's response to HEAD of ``place``, or None if the key does not exist.
        Raises the client's exceptions."""
        try:
            found = self._client.head_object(**place)
        except ClientError as exc:
            if self.is_absent(place, exc):
                return None
            raise
        self.note_read(place)
        return found

    def _is_proven(self) -> bool:
        read = self._read  # once: another thread may forget it
        return read is not None and self._clock() - read[1] <= PROOF_S

    def _reads_again(self) -> bool:
        """Whether the last key that was read can still be read. Forgets it if not: it may have been
        deleted since, and then only the next read is a proof."""
        read = self._read
        if read is None:
            return False
        place = read[0]
        try:
            self._client.head_object(**place)
        except ClientError as exc:
            if error_code(exc)[0] in (403, 404):
                self._read = None
            return False
        except (BotoCoreError, StoreError):
            return False
        self.note_read(place)
        return True


@dataclass(frozen=True, slots=True)
class Get:
    """One get: the value, which bytes of it, and the target buffer."""

    place: dict[str, Any]
    """Bucket and key as the client's arguments."""
    key: str
    deadline: CallDeadline
    start: int | None = None
    """Position in the value. None requests the whole value, which must fit in the buffer."""
    buffer: memoryview | None = None
    """None for a new one."""
    room: int = VALUE_BYTES_MAX
    """The most bytes to read, the length of ``buffer``."""
    arrived: Arrived | None = None


class S3Reader:
    """Reads on a ``Wire``. If a response breaks off, only the missing bytes of the same version are
    requested. Raises the client's exceptions and ``StoreError``."""

    def __init__(self, wire: Wire, pool: HelperPool, absence: Absence, *, range_bytes: int) -> None:
        self.wire = wire
        self.pool = pool
        self.absence = absence
        self.range_bytes = range_bytes

    def read(self, get: Get) -> memoryview | None:
        """Return the bytes that were read, of the buffer, or None if the key does not exist."""
        start, sizes = get.start or 0, [get.room]
        if get.buffer is not None and self.pool.threads_max and get.room > self.range_bytes:
            sizes.insert(0, self.range_bytes)
        for size in sizes:
            is_whole = get.start is None and size == get.room
            try:
                extra = {} if is_whole else _range(start, start + size)
                response = self.wire.ask("GET", get.key, extra, get.deadline)
            except ClientError as exc:
                if error_code(exc)[0] == 416:  # it starts after the end, so the key exists
                    if get.arrived is not None:
                        get.arrived(0)
                    return memoryview(b"")
                if self.absence.is_absent(get.place, exc):
                    return None
                raise
            with response:
                self.absence.note_read(get.place)
                nbytes = _length(get, response, size)
                if response.left >= nbytes or response.etag:
                    return _Reading(self, get, response, nbytes).run(response)
        raise ConnectionFailed("the server returned a part of a value without its version")


def _length(get: Get, response: HttpResponse, size: int) -> int:
    """Return how many bytes of the value belong to ``get``, whose first request was for ``size``
    bytes. Skips those before. Raises for a response that must not be written to the buffer."""
    if response.status not in (200, 206):
        raise ConnectionFailed(f"HTTP {response.status} instead of a value")
    start = get.start or 0
    if response.status == 206 and not (response.left <= size and response.starts_at(start)):
        raise ConnectionFailed(_OTHER_RANGE)
    nbytes = max(0, response.total - start)
    if get.buffer is not None and get.start is None:
        check_fits(get.key, nbytes, get.buffer)
    elif get.start is None and nbytes > get.room:
        raise StoreError(f"the server returned {nbytes} bytes, more than the limit of {get.room}")
    if response.status == 200 and start:  # a server without ranges
        skipped, end = memoryview(bytearray(STEP_BYTES)), min(start, response.total)
        for at in range(0, end, STEP_BYTES):
            response.fill(skipped[: end - at], get.deadline.end_s)
    elif response.left > nbytes:
        raise ConnectionFailed("the server returned a range that extends past the end")
    return min(nbytes, get.room)


class _Reading:
    """One get after the head of its first response."""

    def __init__(self, reader: S3Reader, get: Get, response: HttpResponse, nbytes: int) -> None:
        self._reader = reader
        self._get = get
        self._end_s = get.deadline.end_s
        buffer = memoryview(bytearray(nbytes)) if get.buffer is None else get.buffer
        self._buffer = buffer[:nbytes]
        self._start = get.start or 0
        self._etag = response.etag
        self._reported = -1
        first = min(response.left, nbytes)
        cuts = [*range(first, nbytes, reader.range_bytes), nbytes]
        self._pieces = [Piece(0, first), *(Piece(start, end) for start, end in pairwise(cuts))]

    def run(self, response: HttpResponse) -> memoryview:
        """Read all pieces, the first from ``response``, the others together with free helpers."""
        if len(self._pieces) == 1:
            self._fill_first(response)
        else:
            with Team(self._reader.pool, self._pieces[1:], self._read) as team:
                self._fill_first(response)
                while (piece := team.take()) is not None:
                    self._read(piece, None)
                    self._report()
                team.wait(self._end_s, self._report)
        for piece in self._pieces:
            self._complete(piece)
        if self._get.arrived is not None and self._reported < len(self._buffer):
            self._get.arrived(len(self._buffer))
        return self._buffer

    def _fill_first(self, response: HttpResponse) -> None:
        first = self._pieces[0]

        def grown(at: int) -> None:
            first.at = at
            self._report()

        with suppress(ConnectionFailed), self._buffer[: first.end] as view:
            response.fill(view, self._end_s, grown)

    def _report(self) -> None:
        """Call ``arrived`` with the length of the complete prefix, if it has grown enough."""
        if self._get.arrived is None:
            return
        prefix = 0
        for piece in self._pieces:
            prefix = piece.at
            if not piece.is_done:
                break
        is_all = prefix == len(self._buffer) > self._reported
        if prefix >= self._reported + PROGRESS_BYTES or is_all:
            self._reported = prefix
            self._get.arrived(prefix)

    def _read(self, piece: Piece, team: Team | None) -> str:
        """Read the rest of ``piece``. Return why it is not done, or an empty text."""
        first = self._start + piece.at
        extra = _range(first, self._start + piece.end)
        begun = reported = piece.at

        def grown(at: int) -> None:
            nonlocal reported
            piece.at = begun + at
            if team is None:
                self._report()
            elif piece.at >= reported + PROGRESS_BYTES:
                reported = piece.at
                team.grew()

        get = self._get
        with self._reader.wire.ask("GET", get.key, extra, get.deadline, team=team) as response:
            is_right = response.left == piece.end - piece.at and response.starts_at(first)
            if response.status != 206 or not is_right:
                return _OTHER_RANGE
            self._check_version(response.etag)
            try:
                response.fill(self._buffer[piece.at : piece.end], self._end_s, grown)
            except ConnectionFailed as exc:
                return f"the connection broke off after {piece.at} bytes: {exc}"
        return ""

    def _complete(self, piece: Piece) -> None:
        """Read what is missing of ``piece``, as often as a request is sent, if there is time."""
        problem = "the connection broke off"
        for attempt in range(ATTEMPTS):
            if piece.is_done:
                return
            if attempt and time.monotonic() > self._get.deadline.last_s:
                problem += ", too late to resume before the deadline"
                break
            problem = self._read(piece, None)
            self._report()
        if not piece.is_done:
            raise ConnectionFailed(problem)

    def _check_version(self, etag: str) -> None:
        """Compare versions here. ``If-Match`` would do, but servers parse it differently (Ceph 16
        expects no quotes)."""
        if not etag:
            raise ConnectionFailed("the connection broke off, and the server sent no version")
        if etag != self._etag:
            raise ConnectionFailed("the value was replaced during the read")


def _range(start: int, end: int) -> dict[str, str]:
    """Return the header that requests bytes ``[start, end)``."""
    return {"range": f"bytes={start}-{end - 1}"}
