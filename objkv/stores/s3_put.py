"""Decides among writers of one key: by one conditional request, or what comes closest to it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from objkv.errors import StoreError, StoreUnavailable
from objkv.stores.s3_body import BufferReader
from objkv.stores.s3_client import asks_for_later, error_code
from objkv.stores.s3_line import NoAnswer
from objkv.stores.s3_term import Term
from objkv.stores.s3_upload import Parts, Uploads
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

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
