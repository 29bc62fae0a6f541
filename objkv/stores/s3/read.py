"""Reads values into the caller's buffer: the first request, then ranges of it beside each other."""

import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from objkv.errors import StoreUnavailable
from objkv.stores.base import Arrived, check_fits, copy_into
from objkv.stores.s3.body import read_all, read_exactly
from objkv.stores.s3.client import Term, is_absent
from objkv.stores.s3.helpers import Crew, Helper, Piece, Team
from objkv.stores.s3.http import Answer, NoAnswer, strong_tag
from objkv.stores.s3.wire import Wire

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

TELL_BYTES = 512 << 10
"""``arrived`` is told whenever so many more bytes have come: fewer than a core's cache holds."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one get wants, and where to."""

    place: dict[str, Any]
    """As the client wants it."""
    key: str
    start: int
    """In the value."""
    buffer: memoryview
    arrived: Arrived | None
    is_whole: bool
    """Whether a value longer than the buffer is an error."""
    term: Term


class Ranges:
    """Reads on a ``Wire``. ``NoAnswer`` before the first byte leaves the get to the client; after
    it, what is missing is asked for again, of the same version of the value; by the client where
    its term allows."""

    def __init__(self, client: "S3Client", wire: Wire, crew: Crew, *, range_bytes: int) -> None:
        self._client = client
        self._wire = wire
        self._crew = crew
        self._range_bytes = range_bytes

    def read(self, wanted: Wanted) -> int | None:
        """How many bytes were read, or None if there is no value. Raises ``NoAnswer``, and
        ``StoreUnavailable`` for what broke off and could not be mended."""
        size, start = len(wanted.buffer), wanted.start
        is_split = self._crew.threads_max > 0 and size > self._range_bytes
        if is_split:
            size = self._range_bytes
        extra = {} if wanted.is_whole and not is_split else _range(start, start + size)
        with self._wire.ask("GET", wanted.key, extra, wanted.term.end_s) as answer:
            if answer.status == 404 and b"<Code>NoSuchKey</Code>" in answer.text(wanted.term.end_s):
                return None
            if answer.status not in (200, 206) or (answer.status == 200 and start):
                raise NoAnswer(f"HTTP {answer.status}")
            if answer.status == 206 and not (answer.left <= size and answer.starts_at(start)):
                raise NoAnswer("another range than was asked for")
            nbytes = answer.total - start
            if answer.left > nbytes:
                raise NoAnswer("a range that goes beyond the end")
            if answer.left < min(nbytes, len(wanted.buffer)) and not answer.etag:
                raise NoAnswer("ranges of nobody knows which version")
            if wanted.is_whole:
                check_fits(wanted.key, nbytes, wanted.buffer)
            elif answer.status == 200 and answer.left > len(wanted.buffer):
                raise NoAnswer("a server without ranges")
            fetch = _Fetch(self, wanted, answer, min(nbytes, len(wanted.buffer)))
            if fetch.is_single:
                fetch.fill_first(answer)
                return fetch.finish()
            return fetch.run(answer)

    def read_by_client(self, wanted: Wanted) -> int | None:
        """Read a whole value as the client does it, which tries again, follows redirects and says
        what is wrong; raises what the client raises. ``arrived`` is told at the end."""
        with wanted.term.client():
            return self._read_by_client(wanted)

    def _read_by_client(self, wanted: Wanted) -> int | None:
        try:
            answer: Any = self._client.get_object(**wanted.place)
        except ClientError as exc:
            if is_absent(self._client, wanted.place, exc):
                return None
            raise
        if answer.get("ContentLength") is None:  # sent in chunks
            value = read_all(answer, wanted.term.end_s)
            return copy_into(wanted.key, value, wanted.buffer, wanted.arrived, None)
        body, nbytes = answer["Body"], int(answer["ContentLength"])
        try:
            check_fits(wanted.key, nbytes, wanted.buffer)
            read_exactly(body, wanted.buffer[:nbytes], wanted.term.end_s)
        except BaseException:
            body.close()  # the connection still carries the rest: it cannot be used again
            raise
        if wanted.arrived is not None:
            wanted.arrived(nbytes)
        return nbytes


class _Fetch:
    """One get after its first answer."""

    def __init__(self, ranges: Ranges, wanted: Wanted, answer: Answer, nbytes: int) -> None:
        self._ranges = ranges
        self._wanted = wanted
        self._nbytes = nbytes
        self._etag = answer.etag
        self._told = -1
        step = ranges._range_bytes
        cuts = [*range(answer.left, nbytes, step), nbytes]
        self._pieces = [Piece(0, answer.left)]
        self._pieces += [Piece(start, end) for start, end in pairwise(cuts)]

    @property
    def is_single(self) -> bool:
        """Whether the first answer has all of it."""
        return len(self._pieces) == 1

    def fill_first(self, answer: Answer) -> None:
        """Read the first answer's body; what is missing of it then, ``finish`` gets."""
        piece = self._pieces[0]

        def grown(at: int) -> None:
            piece.at = at
            self._tell()

        with suppress(NoAnswer), self._wanted.buffer[: piece.end] as view:
            answer.fill(view, self._wanted.term.end_s, grown)

    def run(self, answer: Answer) -> int:
        """Read all pieces, the first from ``answer``, with whoever is free."""
        with Team(self._ranges._crew, self._pieces[1:], self._read) as team:
            self.fill_first(answer)
            while (piece := team.take()) is not None:
                try:
                    self._read(piece, None)
                except NoAnswer:
                    continue
                self._tell()
            team.wait(self._wanted.term.end_s, self._tell)
        return self.finish()

    def finish(self) -> int:
        """Get what is missing by the client, and tell that all is there."""
        for piece in self._pieces:
            if not piece.is_done:
                self._mend(piece)
                self._tell()
        if self._wanted.arrived is not None and self._told < self._nbytes:
            self._wanted.arrived(self._nbytes)
        return self._nbytes

    def _tell(self) -> None:
        """Tell how much there is from the beginning on, if it is worth it."""
        if self._wanted.arrived is None:
            return
        prefix = 0
        for piece in self._pieces:
            prefix = piece.at
            if not piece.is_done:
                break
        if prefix >= self._told + TELL_BYTES or prefix == self._nbytes > self._told:
            self._told = prefix
            self._wanted.arrived(prefix)

    def _read(self, piece: Piece, helper: Helper | None) -> None:
        wanted = self._wanted
        first = wanted.start + piece.at
        extra = _range(first, wanted.start + piece.end)
        begun = told = piece.at

        def grown(at: int) -> None:
            nonlocal told
            piece.at = begun + at
            if helper is None:
                self._tell()
            elif piece.at >= told + TELL_BYTES:
                told = piece.at
                helper.grew()

        asked = self._ranges._wire.ask("GET", wanted.key, extra, wanted.term.end_s, watcher=helper)
        with asked as answer:
            is_right = answer.left == piece.end - piece.at and answer.starts_at(first)
            if answer.status != 206 or not is_right:
                raise NoAnswer(f"HTTP {answer.status}")
            self._check_version(answer.etag)
            answer.fill(wanted.buffer[piece.at : piece.end], wanted.term.end_s, grown)

    def _mend(self, piece: Piece) -> None:
        with suppress(NoAnswer):
            self._read(piece, None)
            return
        wanted, ranges = self._wanted, self._ranges
        if time.monotonic() > wanted.term.last_s:
            raise StoreUnavailable(
                f"get_into {wanted.key}: broke off after {piece.at} of {self._nbytes} bytes, "
                "too late to be mended before the deadline passed"
            )
        with wanted.term.client():
            answer: Any = ranges._client.get_object(
                **wanted.place,
                Range=f"bytes={wanted.start + piece.at}-{wanted.start + piece.end - 1}",
            )
            self._take_mended(answer, piece)
        piece.at = piece.end

    def _take_mended(self, answer: Any, piece: Piece) -> None:
        key, body = self._wanted.key, answer["Body"]
        try:
            self._check_version(strong_tag(answer.get("ETag", "")))
            if answer.get("ContentLength") != piece.end - piece.at:
                raise StoreUnavailable(f"get_into {key}: broke off, and no range was served")
            into = self._wanted.buffer[piece.at : piece.end]
            read_exactly(body, into, self._wanted.term.end_s)
        except BaseException:
            body.close()
            raise

    def _check_version(self, etag: str) -> None:
        """Compared here rather than asked for by ``If-Match``, which servers read differently
        (Ceph 16 wants no quotes)."""
        if not etag or etag != self._etag:
            how = "replaced while it was read" if etag else "broke off, and no version was named"
            raise StoreUnavailable(f"get_into {self._wanted.key}: {how}")


def _range(start: int, end: int) -> dict[str, str]:
    """The header that asks for bytes ``[start, end)``."""
    return {"range": f"bytes={start}-{end - 1}"}
