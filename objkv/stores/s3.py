"""A store in a bucket of anything that speaks S3.

A get reads the body into the caller's buffer, slice by slice. A put is one conditional
request, so of many writers one wins; values above ``multipart_bytes`` go up in parts.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from objkv.errors import StoreUnavailable
from objkv.stores.base import (
    Arrived,
    Buffer,
    Entry,
    check_fits,
    check_key,
    check_prefix,
    copy_range_into,
    is_key,
)
from objkv.stores.s3_body import BufferReader, read_exactly
from objkv.stores.s3_client import error_code, is_missing, translated
from objkv.telemetry import NullRecorder, Recorder

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

CONFLICT_TRIES = 5

_EXISTS = 412
_CONFLICT = 409
_REFUSALS = {"NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedArgument"}


class S3Store:
    """Values as objects ``<prefix>/<key>`` of ``bucket``; closes ``client`` with itself.

    ``If-None-Match: *`` decides among writers. Servers that refuse it, or take it and ignore it
    (found out by repeating the first put that succeeded), get HEAD and PUT instead, counted as
    ``s3_unconditional_puts``: two writers at one moment may then both get True. So may two
    writers of a value above ``multipart_bytes`` on a server that ignores the condition when an
    upload is completed (Ceph 16). A put whose answer was lost and that the client repeated
    gets False though it wrote.

    ``deadline_s`` bounds the reading of one body. Reads need the permission to list: without it
    S3 answers 403 instead of 404 for what is not there.
    """

    def __init__(
        self,
        client: "S3Client",
        *,
        bucket: str,
        prefix: str,
        multipart_bytes: int,
        deadline_s: float = 30.0,
        recorder: Recorder | None = None,
    ) -> None:
        assert multipart_bytes > 0
        prefix = prefix.strip("/")
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._multipart_bytes = multipart_bytes
        self._deadline_s = deadline_s
        self._recorder = recorder or NullRecorder()
        self._conditional: bool | None = None

    def __repr__(self) -> str:
        return f"<S3Store s3://{self._bucket}/{self._prefix} at {self._client.meta.endpoint_url}>"

    @property
    def conditional_puts(self) -> bool | None:
        """Whether the server honours ``If-None-Match``; None until the first put found out."""
        return self._conditional

    def get(self, key: str) -> bytes | None:
        """The whole object, or None."""
        with translated("get", key):
            answer = self._get(key)
            if answer is None:
                return None
            value: bytes = answer["Body"].read()
            return value

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes ``[start, end)`` by one ranged request, or None."""
        if end <= start:
            return None if self.head(key) is None else b""
        with translated("get_range", key):
            try:
                answer = self._get(key, Range=f"bytes={start}-{end - 1}")
            except ClientError as exc:
                if error_code(exc)[0] == 416:  # beyond the end, so there is a value
                    return b""
                raise
            if answer is None:
                return None
            value: bytes = answer["Body"].read()
            ranged = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
            return value if ranged else value[start:end]

    def get_range_into(
        self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None
    ) -> int | None:
        """Get the bytes and copy them into ``buffer``."""
        value = self.get_range(key, start, start + len(buffer))
        return None if value is None else copy_range_into(value, 0, buffer, arrived)

    def get_into(self, key: str, buffer: memoryview, arrived: Arrived | None = None) -> int | None:
        """Read the body from the socket into ``buffer``; its length is checked before and after."""
        with translated("get_into", key):
            answer = self._get(key)
        if answer is None:
            return None
        body, nbytes = answer["Body"], int(answer["ContentLength"])
        whole = False
        try:
            check_fits(key, nbytes, buffer)
            with translated("get_into", key):
                read_exactly(body, buffer[:nbytes], time.monotonic() + self._deadline_s)
            whole = True
        finally:
            if not whole:  # the connection still carries the rest: it cannot be used again
                body.close()
        if arrived is not None:
            arrived(nbytes)
        return nbytes

    def head(self, key: str) -> Entry | None:
        """Size and age of the object, or None. A missing bucket is None as well: the answer to a
        HEAD does not tell one from the other."""
        check_key(key)
        with translated("head", key):
            try:
                answer = self._client.head_object(**self._place(key))
            except ClientError as exc:
                if is_missing(exc):
                    return None
                raise
            return Entry(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Entries in key order, a page of 1000 in memory; objects that are no keys are left out."""
        check_prefix(prefix)
        lister = self._client.get_paginator("list_objects_v2")
        pages = iter(lister.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix))
        while True:
            with translated("scan", self._prefix + prefix or self._bucket):
                page = next(pages, None)
            if page is None:
                return
            for found in page.get("Contents", ()):
                key = found["Key"].removeprefix(self._prefix)
                if is_key(key):
                    yield Entry(key, found["Size"], found["LastModified"].timestamp())

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """One conditional request; see the class for servers that have none."""
        check_key(key)
        attempt = self._upload_if_absent if self._is_large(value) else self._send_if_absent
        with translated("put_if_absent", key):
            for _ in range(CONFLICT_TRIES):
                try:
                    return attempt(key, value)
                except ClientError as exc:
                    status, _code = error_code(exc)
                    if status == _EXISTS:
                        return False
                    if status != _CONFLICT:
                        raise
                if self.head(key) is not None:
                    return False
        raise StoreUnavailable(
            f"put_if_absent {key}: {CONFLICT_TRIES} conflicts with other writers"
        )

    def put(self, key: str, value: Buffer) -> None:
        """One request, or an upload in parts."""
        check_key(key)
        with translated("put", key):
            if self._is_large(value):
                self._upload(key, value, self._complete)
            else:
                self._send(key, value)

    def delete(self, key: str) -> bool:
        """Remove the object. S3 does not tell whether there was one: always True."""
        check_key(key)
        with translated("delete", key):
            self._client.delete_object(**self._place(key))
        return True

    def check(self) -> None:
        """List one object: the answer to a listing names what is wrong, that to a HEAD does not."""
        with translated("check", f"s3://{self._bucket} at {self._client.meta.endpoint_url}"):
            self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)

    def close(self) -> None:
        """Close the client and its connections."""
        self._client.close()

    def _is_large(self, value: Buffer) -> bool:
        return len(value) > self._multipart_bytes

    def _place(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _get(self, key: str, **options: Any) -> dict[str, Any] | None:
        check_key(key)
        try:
            return dict(self._client.get_object(**self._place(key), **options))
        except ClientError as exc:
            if is_missing(exc):
                return None
            raise

    def _send(self, key: str, value: Buffer, **options: Any) -> None:
        with memoryview(value) as view:
            self._client.put_object(
                **self._place(key), Body=_body(view), ContentLength=len(view), **options
            )

    def _send_if_absent(self, key: str, value: Buffer) -> bool:
        if self._conditional is not False:
            try:
                self._send(key, value, IfNoneMatch="*")
            except ClientError as exc:
                if not _is_refused(exc):
                    raise
            else:
                if self._conditional is None:
                    self._conditional = self._refuses_a_second(key, value)
                return True
        self._recorder.count("s3_unconditional_puts")
        if self.head(key) is not None:
            return False
        self._send(key, value)
        self._conditional = False
        return True

    def _refuses_a_second(self, key: str, value: Buffer) -> bool:
        """Whether the condition is honoured. The same bytes once more do no harm where it is not;
        asked once per process, since HEAD before every PUT would cost a round trip each."""
        try:
            self._send(key, value, IfNoneMatch="*")
        except ClientError as exc:
            return error_code(exc)[0] in (_EXISTS, _CONFLICT)
        return False

    def _upload_if_absent(self, key: str, value: Buffer) -> bool:
        if self.head(key) is not None:  # spares the upload; completing it decides
            return False
        return self._upload(key, value, self._complete_if_absent)

    def _upload(
        self, key: str, value: Buffer, complete: Callable[[str, dict[str, Any]], bool]
    ) -> bool:
        """Upload in parts, aborted unless ``complete`` returns True: no part may stay behind."""
        place, done = self._place(key), False
        place["UploadId"] = self._client.create_multipart_upload(**place)["UploadId"]
        try:
            parts: list[dict[str, Any]] = []
            with memoryview(value) as view:
                for start in range(0, len(view), self._multipart_bytes):
                    body = _body(view[start : start + self._multipart_bytes])
                    number = len(parts) + 1
                    answer = self._client.upload_part(**place, PartNumber=number, Body=body)
                    parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            done = complete(key, {**place, "MultipartUpload": {"Parts": parts}})
            return done
        finally:
            if not done:
                # What went wrong before is the news; a bucket rule should expire lost uploads.
                with suppress(ClientError, BotoCoreError):
                    self._client.abort_multipart_upload(**place)

    def _complete(self, _: str, upload: dict[str, Any]) -> bool:
        self._client.complete_multipart_upload(**upload)
        return True

    def _complete_if_absent(self, key: str, upload: dict[str, Any]) -> bool:
        if self.head(key) is not None:  # servers exist that ignore the condition here
            return False
        if self._conditional is not False:
            try:
                self._client.complete_multipart_upload(**upload, IfNoneMatch="*")
                return True
            except ClientError as exc:
                if not _is_refused(exc):
                    raise
        self._recorder.count("s3_unconditional_puts")
        return self._complete(key, upload)


def _is_refused(exc: ClientError) -> bool:
    """Whether the server does not know conditional writes."""
    status, code = error_code(exc)
    return status == 501 or (status == 400 and code in _REFUSALS)


def _body(view: memoryview) -> Any:
    """What the client asks for is ``read``, ``seek`` and ``tell``; its types say more."""
    return BufferReader(view)
