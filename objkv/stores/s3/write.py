"""Writes values, each in one conditional request, straight from the caller's buffer.

Servers without conditional requests get the closest substitute.
"""

import base64
import hashlib
import zlib

from botocore.exceptions import BotoCoreError, ClientError

from objkv.config import Config
from objkv.errors import StoreError, StoreUnavailable
from objkv.stores.s3.bucket import Bucket
from objkv.stores.s3.errors import asks_for_later, error_code
from objkv.telemetry import Recorder

CONFLICT_TRIES = 5
_EXISTS = 412
_CONFLICT = 409
_REFUSALS = {"NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedArgument"}


class PutHeaders:
    """The headers of every put that a bucket demands, by the settings: encryption, an ACL, a
    checksum of the body."""

    def __init__(self, config: Config) -> None:
        self._checksum, self._signs_payloads = config.s3_checksum, config.s3_signed_payloads
        given = {
            "x-amz-server-side-encryption": config.s3_sse,
            "x-amz-server-side-encryption-aws-kms-key-id": config.s3_sse_kms_key_id,
            "x-amz-acl": config.s3_acl,
        }
        self._fixed = {name: text for name, text in given.items() if text}

    def of(self, value: memoryview) -> dict[str, str]:
        """Return the headers for ``value``."""
        headers = {"content-length": str(len(value)), **self._fixed}
        if self._checksum is not None:
            if self._checksum == "crc32":
                digest = zlib.crc32(value).to_bytes(4, "big")
            else:
                digest = hashlib.sha256(value).digest()
            headers[f"x-amz-checksum-{self._checksum}"] = base64.b64encode(digest).decode()
        if self._signs_payloads:
            headers["x-amz-content-sha256"] = hashlib.sha256(value).hexdigest()
        return headers


class S3Writer:
    """Puts the values of ``bucket``. Raises the client's exceptions and ``StoreError``."""

    def __init__(self, bucket: Bucket, config: Config, recorder: Recorder) -> None:
        self._bucket = bucket
        self._headers = PutHeaders(config)
        self._recorder = recorder
        self.conditional: bool | None = None
        """Whether the server honours ``If-None-Match``; None before the first put."""

    def put_if_absent(self, key: str, value: memoryview) -> bool:
        """Write the value unless the key exists, and return whether this call wrote it."""
        for _ in range(CONFLICT_TRIES):
            try:
                return self._put_once(key, value)
            except ClientError as exc:
                if error_code(exc)[0] != _CONFLICT:
                    raise
            if self._bucket.head(key) is not None:
                return False
        raise StoreUnavailable(
            f"put_if_absent {key}: {CONFLICT_TRIES} conflicts with other writers, retry later"
        )

    def put(self, key: str, value: memoryview, *, if_absent: bool = False) -> None:
        """Write the value, replacing an existing one, unless the condition is sent."""
        extra = self._headers.of(value)
        if if_absent:
            extra["if-none-match"] = "*"
        with self._bucket.ask("PUT", key, extra, value) as response:
            response.read()

    def _put_once(self, key: str, value: memoryview) -> bool:
        if self.conditional is not False:
            try:
                self.put(key, value, if_absent=True)
            except ClientError as exc:
                if error_code(exc)[0] == _EXISTS:
                    return False
                if not _is_refused(exc):
                    raise
            else:
                if self.conditional is None:
                    self.conditional = self._refuses_a_second(key, value)
                return True
        self._recorder.count("s3_unconditional_puts")
        if self._bucket.head(key) is not None:
            return False
        self.put(key, value)
        self.conditional = False
        return True

    def _refuses_a_second(self, key: str, value: memoryview) -> bool | None:
        """Whether the server honours the condition; None if the next put must find out. Repeating
        the same bytes does no harm if it does not. Done once per process, because a HEAD before
        every PUT would cost a round trip each."""
        try:
            self.put(key, value, if_absent=True)
        except ClientError as exc:
            if asks_for_later(exc) and not _is_refused(exc):
                return None
            return error_code(exc)[0] in (_EXISTS, _CONFLICT)
        except (BotoCoreError, StoreError):  # no response, but the value was already stored
            return None
        return False


def _is_refused(exc: ClientError) -> bool:
    """Whether the server does not support conditional writes."""
    status, code = error_code(exc)
    return status == 501 or (status == 400 and code in _REFUSALS)
