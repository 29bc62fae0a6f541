"""Demands of a bucket on every put: encryption, an ACL, a checksum of the body.

A demand has two forms: headers of a put, and the client's arguments for the start of an upload in
parts. Both are made here.
"""

import base64
import hashlib
import zlib
from dataclasses import dataclass
from typing import Any

from objkv.config import Config

_HEADERS = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ACL": "x-amz-acl",
}


@dataclass(frozen=True, slots=True)
class PutDemands:
    """The demands of one bucket. By default none."""

    sse: str | None = None
    """``AES256`` or ``aws:kms``."""
    kms_key_id: str | None = None
    acl: str | None = None
    checksum: str | None = None
    """``crc32`` or ``sha256``."""
    signs_payloads: bool = False

    @classmethod
    def of(cls, config: Config) -> "PutDemands":
        """Return the demands in the settings."""
        return cls(
            config.s3_sse,
            config.s3_sse_kms_key_id,
            config.s3_acl,
            config.s3_checksum,
            config.s3_signed_payloads,
        )

    @property
    def hashes_bodies(self) -> bool:
        """Whether a request depends on its body."""
        return self.checksum is not None or self.signs_payloads

    def arguments(self) -> dict[str, Any]:
        """Return the client's arguments for the start of an upload in parts."""
        given = {
            "ServerSideEncryption": self.sse,
            "SSEKMSKeyId": self.kms_key_id,
            "ACL": self.acl,
            "ChecksumAlgorithm": self.checksum and self.checksum.upper(),
        }
        return {name: value for name, value in given.items() if value}

    def headers(self) -> dict[str, str]:
        """Return the headers of a put, without those of its body."""
        given = self.arguments()
        return {header: given[name] for name, header in _HEADERS.items() if name in given}

    def body_headers(self, view: memoryview) -> dict[str, str]:
        """Return the headers of a request that depend on its body."""
        headers = {}
        if self.checksum is not None:
            if self.checksum == "crc32":
                digest = zlib.crc32(view).to_bytes(4, "big")
            else:
                digest = hashlib.sha256(view).digest()
            headers[f"x-amz-checksum-{self.checksum}"] = base64.b64encode(digest).decode()
        if self.signs_payloads:
            headers["x-amz-content-sha256"] = hashlib.sha256(view).hexdigest()
        return headers

    def sum_of(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the checksum in ``body_headers`` of a part, by the name that the client uses."""
        if self.checksum is None:
            return {}
        return {f"Checksum{self.checksum.upper()}": headers[f"x-amz-checksum-{self.checksum}"]}
