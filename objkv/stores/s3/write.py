"""Writes values: small ones in one conditional request, large ones in parts uploaded in parallel.

Both send straight from the caller's buffer; only bytes in flight are in the sockets' buffers.
Servers without conditional requests get the closest substitute.
"""

import base64
import hashlib
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from botocore.exceptions import BotoCoreError, ClientError

from objkv.config import Config
from objkv.errors import StoreError, StoreUnavailable
from objkv.net.deadline import EndsBy
from objkv.stores.s3.client import CallDeadline, asks_for_later, begun_by, error_code
from objkv.stores.s3.http import ConnectionFailed
from objkv.stores.s3.pieces import Piece, Team
from objkv.stores.s3.read import Get, S3Reader
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

CONFLICT_TRIES = 5
_EXISTS = 412
_CONFLICT = 409
_REFUSALS = {"NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedArgument"}
_HEADERS = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ACL": "x-amz-acl",
}


class PutDemands:
    """What a bucket demands of every put, by the settings: encryption, an ACL, a checksum of the
    body. A demand has two forms: headers, and the client's arguments for the start of an upload in
    parts."""

    def __init__(self, config: Config) -> None:
        self._checksum, self._signs_payloads = config.s3_checksum, config.s3_signed_payloads
        given = {
            "ServerSideEncryption": config.s3_sse,
            "SSEKMSKeyId": config.s3_sse_kms_key_id,
            "ACL": config.s3_acl,
            "ChecksumAlgorithm": self._checksum and self._checksum.upper(),
        }
        self.arguments: dict[str, Any] = {name: text for name, text in given.items() if text}
        self.headers = {
            header: self.arguments[name]
            for name, header in _HEADERS.items()
            if name in self.arguments
        }
        """Those that do not depend on the body."""
        self.hashes_bodies = self._checksum is not None or self._signs_payloads
        """Whether a request depends on its body."""

    def body_headers(self, view: memoryview) -> dict[str, str]:
        """Return the headers of a request that depend on its body."""
        headers = {}
        if self._checksum is not None:
            if self._checksum == "crc32":
                digest = zlib.crc32(view).to_bytes(4, "big")
            else:
                digest = hashlib.sha256(view).digest()
            headers[f"x-amz-checksum-{self._checksum}"] = base64.b64encode(digest).decode()
        if self._signs_payloads:
            headers["x-amz-content-sha256"] = hashlib.sha256(view).hexdigest()
        return headers

    def sum_of(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the checksum in ``body_headers`` of a part, by the name that the client uses."""
        if self._checksum is None:
            return {}
        return {f"Checksum{self._checksum.upper()}": headers[f"x-amz-checksum-{self._checksum}"]}


@dataclass(frozen=True, slots=True)
class Put:
    """One put: its target and its value."""

    place: dict[str, Any]
    """Bucket and key as the client's arguments."""
    key: str
    view: memoryview
    deadline: CallDeadline


class S3Writer:
    """Puts the values of one store, with the requests and threads of ``reader``. Raises the
    client's exceptions and ``StoreError``."""

    def __init__(
        self,
        client: "S3Client",
        reader: S3Reader,
        config: Config,
        recorder: Recorder,
        *,
        multipart_bytes: int,
    ) -> None:
        self._client: Any = client
        self._reader = reader
        self._demands = PutDemands(config)
        self._multipart_bytes = multipart_bytes
        self._recorder = recorder
        self.conditional: bool | None = None
        """Whether the server honours ``If-None-Match``; None before the first put."""

    def put_if_absent(self, put: Put) -> bool:
        """Write the value unless the key exists, and return whether this call wrote it."""
        for _ in range(CONFLICT_TRIES):
            try:
                if not self._is_large(put):
                    return self._send_if_absent(put)
                if self._exists(put):  # avoids the upload; completing it decides
                    return False
                return self._upload(put, if_absent=True)
            except ClientError as exc:
                status, _code = error_code(exc)
                if status == _EXISTS:
                    return False
                if status != _CONFLICT:
                    raise
            if self._exists(put):
                return False
        raise StoreUnavailable(
            f"put_if_absent {put.key}: {CONFLICT_TRIES} conflicts with other writers, retry later"
        )

    def put(self, put: Put) -> None:
        """Write the value, replacing an existing one."""
        if self._is_large(put):
            self._upload(put, if_absent=False)
        else:
            self._send(put)

    def _is_large(self, put: Put) -> bool:
        return len(put.view) > self._multipart_bytes

    def _exists(self, put: Put) -> bool:
        return self._reader.absence.head(put.place) is not None

    def _send(self, put: Put, *, if_absent: bool = False) -> None:
        extra = {"content-length": str(len(put.view)), **self._demands.headers}
        extra |= self._demands.body_headers(put.view)
        if if_absent:
            extra["if-none-match"] = "*"
        wire = self._reader.wire
        with wire.ask("PUT", put.key, extra, put.deadline, body=lambda: put.view) as response:
            response.read(put.deadline.end_s)

    def _send_if_absent(self, put: Put) -> bool:
        if self.conditional is not False:
            try:
                self._send(put, if_absent=True)
            except ClientError as exc:
                if error_code(exc)[0] == _EXISTS:
                    return _is_repeated(exc) and self._is_own(put)
                if not _is_refused(exc):
                    raise
            else:
                if self.conditional is None:
                    self.conditional = self._refuses_a_second(put)
                return True
        self._recorder.count("s3_unconditional_puts")
        if self._exists(put):
            return False
        self._send(put)
        self.conditional = False
        return True

    def _is_own(self, put: Put) -> bool:
        """Whether the stored value is that of ``put``, whose earlier attempt may have written it
        although its response was lost. Equal bytes of another writer count too."""
        with suppress(ClientError, BotoCoreError, StoreError):
            found = self._reader.absence.head(put.place)
            if found is None or found["ContentLength"] != len(put.view):
                return False
            digest = hashlib.md5(put.view, usedforsecurity=False).hexdigest()
            if found["ETag"].strip('"') == digest:
                return True
            # With KMS, the ETag is not a digest of the value.
            get = Get(put.place, put.key, put.deadline, room=len(put.view))
            return self._reader.read(get) == put.view
        return False

    def _refuses_a_second(self, put: Put) -> bool | None:
        """Whether the server honours the condition; None if the next put must find out. Repeating
        the same bytes does no harm if it does not. Done once per process, because a HEAD before
        every PUT would cost a round trip each."""
        try:
            self._send(put, if_absent=True)
        except ClientError as exc:
            if asks_for_later(exc) and not _is_refused(exc):
                return None
            return error_code(exc)[0] in (_EXISTS, _CONFLICT)
        except (BotoCoreError, StoreError):  # no response, but the value was already stored
            return None
        return False

    def _upload(self, put: Put, *, if_absent: bool) -> bool:
        """Upload in parts, and return whether this writer's value won. Abort if not, so that no
        part stays behind."""
        deadline = put.deadline
        created = self._client.create_multipart_upload(**put.place, **self._demands.arguments)
        upload = {**put.place, "UploadId": created["UploadId"]}
        done = False
        try:
            with EndsBy(deadline.abort_s):
                parts = self._send_parts(put, upload["UploadId"])
                whole = {**upload, "MultipartUpload": {"Parts": parts}}
                done = self._complete(put, whole, if_absent=if_absent)
            return done
        finally:
            if not done:
                # The first error matters more. A bucket rule should expire lost uploads.
                with (
                    begun_by(deadline.end_s, deadline.end_s),
                    suppress(ClientError, BotoCoreError, StoreError),
                ):
                    self._client.abort_multipart_upload(**upload)

    def _send_parts(self, put: Put, upload: str) -> list[dict[str, Any]]:
        """Upload all parts, and return number, tag and checksum of each."""
        sent: dict[int, dict[str, Any]] = {}
        deadline = replace(put.deadline, end_s=put.deadline.abort_s)

        def send(piece: Piece, team: Team | None) -> None:
            number = piece.start // self._multipart_bytes + 1
            target = f"{put.key}?partNumber={number}&uploadId={quote(upload, safe='-_.~')}"

            def body() -> memoryview:
                return put.view[piece.start : piece.end]

            sums = self._demands.body_headers(body()) if self._demands.hashes_bodies else {}
            extra = {"content-length": str(piece.end - piece.start), **sums}
            asked = self._reader.wire.ask("PUT", target, extra, deadline, body=body, team=team)
            with asked as response:
                response.read(deadline.end_s)
            if "etag" not in response.headers:
                raise ConnectionFailed("the server took a part and sent no ETag")
            tag = {"PartNumber": number, "ETag": response.headers["etag"]}
            sent[number] = tag | self._demands.sum_of(sums)
            piece.at = piece.end

        nbytes, step = len(put.view), self._multipart_bytes
        pieces = [Piece(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]
        # A helper must not touch the buffer before it has a connection, so it cannot hash a part.
        if not self._demands.hashes_bodies:
            with Team(self._reader.pool, pieces, send, writes=True) as team:
                while (piece := team.take()) is not None:
                    send(piece, None)
                team.wait(deadline.end_s, lambda: None)
        for piece in pieces:
            if not piece.is_done:
                send(piece, None)
        return [sent[number] for number in sorted(sent)]

    def _complete(self, put: Put, upload: dict[str, Any], *, if_absent: bool) -> bool:
        """Return whether this writer's value won."""
        if if_absent:
            if self._exists(put):  # some servers ignore the condition here
                return False
            if self.conditional is not False:
                try:
                    self._client.complete_multipart_upload(**upload, IfNoneMatch="*")
                    return True
                except ClientError as exc:
                    if not _is_refused(exc):
                        raise
            self._recorder.count("s3_unconditional_puts")
        self._client.complete_multipart_upload(**upload)
        return True


def _is_repeated(exc: ClientError) -> bool:
    """Whether the request had been sent before."""
    return bool(exc.response.get("ResponseMetadata", {}).get("RetryAttempts"))


def _is_refused(exc: ClientError) -> bool:
    """Whether the server does not support conditional writes."""
    status, code = error_code(exc)
    return status == 501 or (status == 400 and code in _REFUSALS)
