"""Decides among writers of one key: by one conditional request, or what comes closest to it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from botocore.exceptions import BotoCoreError, ClientError

from objkv.errors import StoreError, StoreUnavailable
from objkv.stores.s3.body import BufferReader
from objkv.stores.s3.client import Term, asks_for_later, begun_by, error_code
from objkv.stores.s3.helpers import Crew, Helper, Piece, Team
from objkv.stores.s3.http import NoAnswer, check_time
from objkv.stores.s3.wire import Wire
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


# Sends values from the caller's buffer: small ones at once, large ones in parts beside each other.
#
# Only what is under way is in the sockets' buffers: no part is copied.

Complete = Callable[[dict[str, Any]], bool]
"""Completes an upload as told by these parameters; whether the value is this one's now."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A value to be uploaded in parts."""

    key: str
    view: memoryview
    part_bytes: int
    term: Term

    def pieces(self) -> list[Piece]:
        """All parts, in order."""
        starts = range(0, len(self.view), self.part_bytes)
        return [
            Piece(start, min(start + self.part_bytes, len(self.view)), number=number)
            for number, start in enumerate(starts, 1)
        ]


class Uploads:
    """Puts over a ``Wire``; parts beside each other by the caller and ``crew``."""

    def __init__(self, client: "S3Client", wire: Wire, crew: Crew) -> None:
        self._client = client
        self._wire = wire
        self._crew = crew

    def put(self, key: str, view: memoryview, deadline_s: float, *, if_absent: bool) -> bool:
        """One request; False if ``if_absent`` and the server says that there is a value.

        Raises ``NoAnswer``: the server may have taken it all the same.
        """
        extra = {"content-length": str(len(view))}
        if if_absent:
            extra["if-none-match"] = "*"
        with self._wire.ask("PUT", key, extra, deadline_s, body=lambda: view) as answer:
            answer.text(deadline_s)
            if answer.status == 412 and if_absent:
                return False
            if answer.status != 200:
                raise NoAnswer(f"HTTP {answer.status}")
            return True

    def put_in_parts(self, place: dict[str, Any], parts: Parts, complete: Complete) -> bool:
        """Upload, aborted unless ``complete`` returns True: no part may stay behind. Raises what
        the client raises, and ``StoreUnavailable``."""
        term = parts.term
        with term.client():
            created = self._client.create_multipart_upload(**place)
        upload = {**place, "UploadId": created["UploadId"]}
        done = False
        try:
            with begun_by(term.last_s, term.abort_s):
                tags = self._send_all(upload, parts)
                listed = [{"PartNumber": n, "ETag": tag} for n, tag in sorted(tags.items())]
                done = complete({**upload, "MultipartUpload": {"Parts": listed}})
            return done
        finally:
            if not done:
                # What went wrong before is the news; a bucket rule should expire lost uploads.
                with (
                    begun_by(term.end_s, term.end_s),
                    suppress(ClientError, BotoCoreError, StoreError),
                ):
                    self._client.abort_multipart_upload(**upload)

    def _send_all(self, upload: dict[str, Any], parts: Parts) -> dict[int, str]:
        """The tag of each part by its number."""
        tags: dict[int, str] = {}
        query = quote(upload["UploadId"], safe="-_.~")

        def send(piece: Piece, helper: Helper | None) -> None:
            target = f"{parts.key}?partNumber={piece.number}&uploadId={query}"
            tags[piece.number] = self._send(target, piece, parts, helper)
            piece.at = piece.end

        pieces = parts.pieces()
        if self._wire.is_found:
            with Team(self._crew, pieces, send, writes=True) as team:
                while (piece := team.take()) is not None:
                    with suppress(NoAnswer):
                        send(piece, None)
                team.wait(parts.term.abort_s, lambda: None)
        for piece in pieces:
            if not piece.is_done:
                check_time(parts.term.abort_s, f"put {parts.key}")
                body: Any = BufferReader(parts.view[piece.start : piece.end])
                answer = self._client.upload_part(**upload, PartNumber=piece.number, Body=body)
                tags[piece.number] = answer["ETag"]
        return tags

    def _send(self, target: str, piece: Piece, parts: Parts, helper: Helper | None) -> str:
        extra = {"content-length": str(piece.end - piece.start)}

        def body() -> memoryview:
            return parts.view[piece.start : piece.end]

        deadline_s = parts.term.abort_s
        asked = self._wire.ask("PUT", target, extra, deadline_s, body=body, watcher=helper)
        with asked as answer:
            answer.text(deadline_s)
            if answer.status != 200 or "etag" not in answer.headers:
                raise NoAnswer(f"HTTP {answer.status}")
            return answer.headers["etag"]


CONFLICT_TRIES = 5
_EXISTS = 412
_CONFLICT = 409
_REFUSALS = {"NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedArgument"}


@dataclass(frozen=True, slots=True)
class Value:
    """What one put sends, and where to."""

    place: dict[str, Any]
    """Bucket and key as the client wants them."""
    key: str
    view: memoryview
    term: Term


class Writer:
    """Puts the values of one store; ``exists`` asks whether a key has one. Raises what the client
    raises, and ``StoreError``."""

    def __init__(
        self,
        client: "S3Client",
        uploads: Uploads,
        *,
        exists: Callable[[str], bool],
        multipart_bytes: int,
        term: Callable[[], Term],
        recorder: Recorder,
    ) -> None:
        self._client = client
        self._uploads = uploads
        self._exists = exists
        self._multipart_bytes = multipart_bytes
        self._term = term
        self._recorder = recorder
        self.conditional: bool | None = None
        """Whether the server honours ``If-None-Match``; None until a put found out."""

    def put_if_absent(self, place: dict[str, Any], key: str, view: memoryview) -> bool:
        """``place``: bucket and key as the client wants them."""
        value = Value(place, key, view, self._term())
        attempt = self._upload_if_absent if self._is_large(view) else self._send_if_absent
        for _ in range(CONFLICT_TRIES):
            try:
                return attempt(value)
            except ClientError as exc:
                status, _code = error_code(exc)
                if status == _EXISTS:
                    return False
                if status != _CONFLICT:
                    raise
            with value.term.client():
                if self._exists(key):
                    return False
        raise StoreUnavailable(
            f"put_if_absent {key}: {CONFLICT_TRIES} conflicts with other writers"
        )

    def put(self, place: dict[str, Any], key: str, view: memoryview) -> None:
        """Replace what is there."""
        value = Value(place, key, view, self._term())
        if self._is_large(view):
            self._upload(value, self._complete)
            return
        with value.term.client():
            with suppress(NoAnswer):
                self._uploads.put(key, view, value.term.end_s, if_absent=False)
                return
            self._send(value)

    def _is_large(self, view: memoryview) -> bool:
        return len(view) > self._multipart_bytes

    def _send(self, value: Value, **options: Any) -> None:
        body: Any = BufferReader(value.view)  # has what the client asks for; its types say more
        size = len(value.view)
        self._client.put_object(**value.place, Body=body, ContentLength=size, **options)

    def _send_if_absent(self, value: Value) -> bool:
        with value.term.client():
            return self._send_conditionally(value)

    def _send_conditionally(self, value: Value) -> bool:
        if self.conditional:
            with suppress(NoAnswer):
                return self._uploads.put(value.key, value.view, value.term.end_s, if_absent=True)
        if self.conditional is not False:
            try:
                self._send(value, IfNoneMatch="*")
            except ClientError as exc:
                if not _is_refused(exc):
                    raise
            else:
                if self.conditional is None:
                    self.conditional = self._refuses_a_second(value)
                return True
        self._recorder.count("s3_unconditional_puts")
        if self._exists(value.key):
            return False
        self._send(value)
        self.conditional = False
        return True

    def _refuses_a_second(self, value: Value) -> bool | None:
        """Whether the condition is honoured; None: the next put has to find out. The same bytes
        once more do no harm where it is not; asked once per process, since HEAD before every PUT
        would cost a round trip each."""
        try:
            self._send(value, IfNoneMatch="*")
        except ClientError as exc:
            if asks_for_later(exc) and not _is_refused(exc):
                return None
            return error_code(exc)[0] in (_EXISTS, _CONFLICT)
        except (BotoCoreError, StoreError):  # no answer: the value is there all the same
            return None
        return False

    def _upload_if_absent(self, value: Value) -> bool:
        with value.term.client():
            if self._exists(value.key):  # spares the upload; completing it decides
                return False
        return self._upload(value, partial(self._complete_if_absent, value.key))

    def _upload(self, value: Value, complete: Callable[[dict[str, Any]], bool]) -> bool:
        parts = Parts(value.key, value.view, self._multipart_bytes, value.term)
        return self._uploads.put_in_parts(value.place, parts, complete)

    def _complete(self, upload: dict[str, Any]) -> bool:
        self._client.complete_multipart_upload(**upload)
        return True

    def _complete_if_absent(self, key: str, upload: dict[str, Any]) -> bool:
        if self._exists(key):  # servers exist that ignore the condition here
            return False
        if self.conditional is not False:
            try:
                self._client.complete_multipart_upload(**upload, IfNoneMatch="*")
                return True
            except ClientError as exc:
                if not _is_refused(exc):
                    raise
        self._recorder.count("s3_unconditional_puts")
        return self._complete(upload)


def _is_refused(exc: ClientError) -> bool:
    """Whether the server does not know conditional writes."""
    status, code = error_code(exc)
    return status == 501 or (status == 400 and code in _REFUSALS)
