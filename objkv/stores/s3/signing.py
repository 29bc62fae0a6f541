"""The endpoint of a bucket's values and the signatures of their requests, both learned from the
client.

The client still resolves the endpoint, finds and renews credentials, and opens the sessions of
directory buckets. This module avoids building each request from botocore's models, 0.5 ms of CPU (2
cores, 2026-11), and deriving the day's key for each signature.
"""

import hmac
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from time import gmtime, strftime, time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.exceptions import NoCredentialsError

from objkv.errors import StoreDenied
from objkv.stores.s3.client import check_headers
from objkv.stores.s3.http import host_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

UNSIGNED = "UNSIGNED-PAYLOAD"
"""Used instead of a hash of the body, also over http: see decision 9 in ``docs/decisions.md``."""

_EMPTY = sha256().hexdigest()
_SOUGHT = "objkv-sought"
_TOKENS = {"s3v4": "x-amz-security-token", "v4-s3express": "x-amz-s3session-token"}
"""The header of a session's token, by the client's name of the signature: both are version 4."""


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """The endpoint of a store's values, as the client resolves it."""

    url: str
    """``scheme://host:port``."""
    host: str
    path: str
    """Ends with ``/``; URL-escaped. Keys need no escaping."""
    region: str
    service: str
    agent: str
    signer: Any
    """The client's, which has its credentials."""
    version: str = "s3v4"
    session: dict[str, Any] = field(default_factory=dict)
    """What the signer needs for a session of a directory bucket."""
    payload: str = UNSIGNED
    """Hash in the signature of a request without a body."""

    def signed(self, method: str, key: str, extra: dict[str, str]) -> bytes:
        """Return the head of a request for ``key``, signed with the client's current credentials.

        ``key`` may end with a query whose parameters are sorted and escaped. ``extra`` has headers
        by lower-case name; all of them are signed. Raises ``StoreDenied`` and the client's
        exceptions, for example if credentials are missing.
        """
        credentials = self.signer.get_auth_instance(
            self.service, self.region, self.version, **self.session
        ).credentials
        if credentials is None:
            raise NoCredentialsError
        now = _timestamp(int(time()))
        headers = {
            "host": self.host,
            "x-amz-content-sha256": self.payload,
            "x-amz-date": now,
            **extra,
        }
        if credentials.token:
            headers[_TOKENS[self.version]] = credentials.token
        scope = f"{now[:8]}/{self.region}/{self.service}/aws4_request"
        target = self.path + key
        path, _, query = target.partition("?")
        names, canonical, lines = _canonical(headers)
        request = (
            f"{method}\n{path}\n{query}\n{canonical}\n{names}\n{headers['x-amz-content-sha256']}"
        )
        signature = hmac.digest(
            _signing_key(credentials.access_key, credentials.secret_key, credentials.token, scope),
            f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{sha256(request.encode()).hexdigest()}".encode(),
            "sha256",
        ).hex()
        return (
            f"{method} {target} HTTP/1.1\r\n{lines}"
            f"authorization: AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}\r\n"
            f"user-agent: {self.agent}\r\n\r\n"
        ).encode("latin-1")


@lru_cache(maxsize=4)
def _signing_key(access: str, secret: str, token: str | None, scope: str) -> bytes:
    """Return the signing key of ``secret``, which is valid for a day. ``scope`` is date, region,
    service and signature name. Raises ``StoreDenied`` if no header can hold the rest."""
    check_headers(access, token or "")
    key = b"AWS4" + secret.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


@lru_cache(maxsize=2)
def _timestamp(second: int) -> str:
    return strftime("%Y%m%dT%H%M%SZ", gmtime(second))


def _canonical(headers: dict[str, str]) -> tuple[str, str, str]:
    """Return the names of the signed headers, the headers as signed, and the headers as sent."""
    names = sorted(headers)
    signed = "".join([f"{name}:{headers[name]}\n" for name in names])
    sent = "".join([f"{name}: {headers[name]}\r\n" for name in names])
    return ";".join(names), signed, sent


class _Built(Exception):
    """Ends a call of the client when it has built its request."""

    def __init__(self, found: S3Endpoint) -> None:
        super().__init__()
        self.found = found


def find_endpoint(client: "S3Client", bucket: str, prefix: str) -> S3Endpoint:
    """Return the endpoint, read from a request that the client builds but does not send. Raises
    ``StoreDenied`` if the client would use another signature than version 4."""
    options: Any = getattr(client.meta.config, "s3", None) or {}
    payload = _EMPTY if options.get("payload_signing_enabled") else UNSIGNED

    def look(request: Any, signature_version: Any, request_signer: Any, **names: str) -> None:
        parts = urlsplit(request.url)
        if not parts.path.endswith(_SOUGHT):
            return  # another thread's request
        if signature_version not in _TOKENS:
            raise StoreDenied(
                f"the AWS client signs with {signature_version}, but objkv signs requests for "
                "values with version 4: remove signature_version from the AWS profile"
            )
        context = request.context.get("signing", {})
        raise _Built(
            S3Endpoint(
                url=f"{parts.scheme}://{parts.netloc}",
                host=host_of(parts),
                path=parts.path.removesuffix(_SOUGHT),
                region=context.get("region") or names["region_name"],
                service=context.get("signing_name") or names["signing_name"],
                agent=request.headers.get("User-Agent", ""),
                signer=request_signer,
                version=signature_version,
                session={n: context[n] for n in ("identity_cache", "cache_key") if n in context},
                payload=payload,
            )
        )

    events: Any = client.meta.events
    events.register_last("before-sign.s3", look)
    try:
        client.get_object(Bucket=bucket, Key=prefix + _SOUGHT)
    except _Built as built:
        return built.found
    finally:
        events.unregister("before-sign.s3", look)
    raise AssertionError
