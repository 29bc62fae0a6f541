"""The bucket of a store: requests for its values, and what AWS's client finds out about them.

The client resolves the endpoint, finds and renews credentials, and opens the sessions of directory
buckets. Building a request from its models takes 0.5 ms of CPU, and signing it 0.1 (2 cores,
2026-11); here both take 0.015.
"""

import hmac
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from time import gmtime, strftime, time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.exceptions import ClientError, NoCredentialsError

from objkv.config import is_directory_bucket
from objkv.errors import StoreDenied
from objkv.stores.base import check_key
from objkv.stores.s3.client import S3Access, check_headers
from objkv.stores.s3.errors import error_code, error_of
from objkv.stores.s3.http import HttpResponse, host_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_HASHES = {"GET": sha256().hexdigest(), "PUT": "UNSIGNED-PAYLOAD"}
"""Of the body, by method. A value is hashed only on demand: decision 9 in ``docs/decisions.md``."""
_SOUGHT = "objkv-sought"
_TOKENS = {"s3v4": "x-amz-security-token", "v4-s3express": "x-amz-s3session-token"}
"""The header of a session's token, by the client's name of the signature: both are version 4."""
_MISSING = {"NoSuchKey", "NotFound", "404"}
_REFUSALS = {"AccessDenied", "Forbidden", "403"}
"""The response to a HEAD has no S3 code."""


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

    def signed(self, method: str, key: str, extra: dict[str, str]) -> bytes:
        """Return the signed head of a request for ``key``. ``extra``: headers by lower-case name,
        signed too. Raises ``StoreDenied`` and the client's exceptions."""
        credentials = self.signer.get_auth_instance(
            self.service, self.region, self.version, **self.session
        ).credentials
        if credentials is None:
            raise NoCredentialsError
        now = strftime("%Y%m%dT%H%M%SZ", gmtime(time()))
        headers = {
            "host": self.host,
            "x-amz-content-sha256": _HASHES[method],
            "x-amz-date": now,
            **extra,
        }
        if credentials.token:
            headers[_TOKENS[self.version]] = credentials.token
        scope = f"{now[:8]}/{self.region}/{self.service}/aws4_request"
        target = self.path + key
        names = sorted(headers)
        canonical = "".join([f"{name}:{headers[name]}\n" for name in names])
        lines = "".join([f"{name}: {headers[name]}\r\n" for name in names])
        signed = ";".join(names)
        request = f"{method}\n{target}\n\n{canonical}\n{signed}\n{headers['x-amz-content-sha256']}"
        signature = hmac.digest(
            _signing_key(credentials.access_key, credentials.secret_key, credentials.token, scope),
            f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{sha256(request.encode()).hexdigest()}".encode(),
            "sha256",
        ).hex()
        return (
            f"{method} {target} HTTP/1.1\r\n{lines}"
            f"authorization: AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={signed}, Signature={signature}\r\n"
            f"user-agent: {self.agent}\r\n\r\n"
        ).encode("latin-1")


@lru_cache(maxsize=4)
def _signing_key(access: str, secret: str, token: str | None, scope: str) -> bytes:
    """Return the signing key of ``secret`` for a day. ``scope``: date, region, service, and name of
    the signature. Raises ``StoreDenied`` if no header can hold the rest."""
    check_headers(access, token or "")
    key = b"AWS4" + secret.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


class _Built(Exception):
    """Ends a call of the client when it has built its request."""

    def __init__(self, found: S3Endpoint) -> None:
        super().__init__()
        self.found = found


def find_endpoint(client: "S3Client", bucket: str, prefix: str) -> S3Endpoint:
    """Return the endpoint, read from a request that the client builds but does not send. Raises
    ``StoreDenied`` if the client would use another signature than version 4."""

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


class Bucket:
    """A bucket under ``prefix``, which is empty or ends with a slash. Thread-safe. Raises the
    client's exceptions and ``StoreError``; its callers are within ``one_call``."""

    def __init__(self, access: S3Access, name: str, prefix: str) -> None:
        self.name, self.prefix = name, prefix
        self.client: Any = access.client
        self._access = access
        self._endpoint: S3Endpoint | None = None

    def endpoint(self) -> S3Endpoint:
        """Return where the requests go. Sends nothing. Raises like ``find_endpoint``."""
        if self._endpoint is None:
            self._endpoint = find_endpoint(self.client, self.name, self.prefix)
        return self._endpoint

    def object_of(self, key: str) -> dict[str, Any]:
        check_key(key)
        return {"Bucket": self.name, "Key": self.prefix + key}

    def ask(
        self, method: str, key: str, extra: dict[str, str], body: memoryview | bytes = b""
    ) -> HttpResponse:
        """Send a request for a value, as often as that may help. The caller closes the response."""
        check_key(key)

        def attempt() -> HttpResponse:
            endpoint = self.endpoint()
            head = endpoint.signed(method, key, extra)
            response = self._access.connections.ask(endpoint.url, head, body)
            if response.status < 300:
                return response
            with response:
                raise error_of(method, response.status, response.read())

        return self._access.retrier.run(attempt)

    def head(self, key: str) -> Any | None:
        """Return the client's response to HEAD, or None if the key does not exist."""
        try:
            return self.client.head_object(**self.object_of(key))
        except ClientError as exc:
            if self.is_absent(key, exc):
                return None
            raise

    def is_absent(self, key: str, error: ClientError) -> bool:
        """Whether ``error``, the response to a request for ``key``, means that it does not exist.

        S3 returns 404 for a missing key to anyone with permission to list, and 403 to all others.
        If that permission is for a prefix, some servers (Ceph 16.2) return 403, because a get names
        none: a listing of this one key then decides. Sessions of directory buckets, which cannot
        list single keys, may list everything, so there it is always a 404.
        """
        status, code = error_code(error)
        if status == 404 and code in _MISSING:
            return True
        if status != 403 or code not in _REFUSALS or is_directory_bucket(self.name):
            return False
        named = self.object_of(key)
        try:
            page = self.client.list_objects_v2(Bucket=self.name, Prefix=named["Key"], MaxKeys=1)
        except ClientError:
            return False
        # Listings are ordered, so the key itself would be the first of all keys that start with it.
        return all(found["Key"] != named["Key"] for found in page.get("Contents", ()))
