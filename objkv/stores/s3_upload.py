"""Sends values from the caller's buffer: small ones at once, large ones in parts beside each other.

Only what is under way is in the sockets' buffers: no part is copied.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from botocore.exceptions import BotoCoreError, ClientError

from objkv.errors import StoreError
from objkv.stores.s3_body import BufferReader
from objkv.stores.s3_client import begun_by
from objkv.stores.s3_crew import Crew, Helper, Piece, Team
from objkv.stores.s3_line import NoAnswer, check_time
from objkv.stores.s3_term import Term
from objkv.stores.s3_wire import Wire

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

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
