"""An S3 server that enforces one demand of a bucket on every put, and checks it for real.

Ceph 16 enforces only the ACL of these; the test against it is in ``tests/services``.
"""

import base64
import hashlib
import zlib
from typing import Literal

from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.quick_s3_values import Answer, Request, Values, failure

Demand = Literal["sse", "kms", "acl", "crc32", "sha256", "signed"]
_HEADERS: dict[str, dict[str, str]] = {
    "sse": {"x-amz-server-side-encryption": "AES256"},
    "kms": {
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "key-1",
    },
    "acl": {"x-amz-acl": "bucket-owner-full-control"},
}


class DemandingS3(QuickS3):
    """``QuickS3`` with a demand; ``refused`` counts the requests that did not meet it."""

    def __init__(self, demand: Demand) -> None:
        super().__init__()
        self._values = _Checked(demand)

    @property
    def refused(self) -> int:
        """How many requests did not meet the demand."""
        assert isinstance(self._values, _Checked)
        return self._values.refused


class _Checked(Values):
    def __init__(self, demand: Demand) -> None:
        super().__init__()
        self._demand = demand
        self.refused = 0

    def answer(self, request: Request, body: memoryview) -> Answer:
        if self._meets(request, body):
            return super().answer(request, body)
        self.refused += 1
        return failure(403, "AccessDenied")

    def _meets(self, request: Request, body: memoryview) -> bool:
        given, wanted = request.headers, self._demand
        if wanted == "signed":
            return given.get("x-amz-content-sha256") == hashlib.sha256(body).hexdigest()
        creates = request.method == "POST" and "uploads" in request.query
        if wanted in _HEADERS:
            is_new = creates or (request.method == "PUT" and "partNumber" not in request.query)
            return not is_new or _HEADERS[wanted].items() <= given.items()
        if creates:
            return given.get("x-amz-checksum-algorithm", "").lower() == wanted
        if request.method != "PUT":
            return True
        digest = (
            zlib.crc32(body).to_bytes(4, "big")
            if wanted == "crc32"
            else hashlib.sha256(body).digest()
        )
        return given.get(f"x-amz-checksum-{wanted}") == base64.b64encode(digest).decode()
