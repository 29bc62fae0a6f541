"""Opens boto3's client from the settings, has its requests sent on our connections, and translates
its exceptions.

The client has credentials, endpoints and the requests that move no payload: it builds, signs,
repeats and parses them. No other package uses its exceptions.
"""

import io
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.awsrequest import AWSResponse, HeadersDict
from botocore.client import Config as ClientConfig
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    NoAuthTokenError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as ClientConnectionError
from botocore.httpsession import get_cert_path

from objkv.config import Config
from objkv.config.aws import (
    aws_region,
    check_credentials,
    check_endpoint,
    is_plain,
    s3_endpoint,
)
from objkv.config.urls import check_proxies
from objkv.errors import ConfigError, StoreBusy, StoreDenied, StoreError, StoreUnavailable
from objkv.net.deadline import EndsBy, ends_s, is_trial
from objkv.stores.s3.http import ConnectionFailed, Connections, host_of, proxy_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


ATTEMPTS = 4
"""Attempts of a request for a value. The client makes one less: the first repetition of a request
for a value does not wait, and the others wait like the client's."""
DEFAULT_REGION = "us-east-1"
_ATTEMPT_SHARE = 0.9 / ATTEMPTS
"""Share of a call's time that an attempt may take. In the rest the client waits between attempts.
"""
_CONNECT_SHARE = 1 / 3
_ABORT_SHARE = 0.1
_FIX = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct bulk_url",
    "AllAccessDisabled": "the bucket is disabled: contact its owner",
    "InvalidBucketName": "the bucket name is invalid: correct bulk_url",
    "InvalidAccessKeyId": "the access key is unknown to the server: check s3_access_key_id "
    "or the AWS credentials in use",
    "SignatureDoesNotMatch": "the secret key does not match the access key: check "
    "s3_secret_access_key or the AWS credentials in use",
    "ExpiredToken": "the session token has expired: renew the AWS credentials",
    "InvalidToken": "the session token is invalid: renew the AWS credentials",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's by more than 15 "
    "minutes: set it (NTP)",
    "AccessDenied": "the credentials lack a permission: a reader may get and list, a writer may "
    "also put, and only a sweeper may delete; use the credentials of that role, with the policy "
    "that `objkv access` prints, or set role to match their permissions",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set s3_region",
    "PermanentRedirect": "the bucket is in another region: set s3_region and s3_endpoint_url",
    "IllegalLocationConstraintException": "the bucket is in another region: set s3_region",
    "QuotaExceeded": "the quota is used up: raise it, or evict payloads",
    "EntityTooLarge": "the server rejects values of this size: lower chunk_tokens, or raise "
    "the server's limit to 64 MiB",
    "InvalidObjectState": (
        "the object was moved to an archive: remove the lifecycle rule that does this"
    ),
}
_DEMANDS = (
    "; a bucket may also demand encryption (s3_sse), an ACL (s3_acl), a checksum (s3_checksum) or "
    "signed bodies (s3_signed_payloads)"
)
"""Added to a refused put: S3 does not say which condition of a policy failed."""
_BUSY = {"SlowDown", "Throttling"}
_LATER = {"RequestTimeout", "RequestTimeoutException", "NoSuchUpload", *_BUSY}
_ELSEWHERE = (301, 302, 307)
_LAST_S: ContextVar[float] = ContextVar("last_s", default=math.inf)


@dataclass(frozen=True, slots=True)
class S3Access:
    """What a store needs of S3: boto3's client, thread-safe, and the connections that it and all
    other requests use."""

    client: "S3Client"
    connections: Connections

    def close(self) -> None:
        """Close both. Idempotent."""
        self.client.close()
        self.connections.close()


def open_s3_access(config: Config) -> S3Access:
    """Return client and connections for the settings. Sends nothing yet.

    Each call of the client, including all its attempts, ends within ``load_deadline_ms`` and the
    limits of ``begun_by``. Raises ``ConfigError``.
    """
    if config.s3_ca_bundle is not None and not config.s3_ca_bundle.is_file():
        raise ConfigError(f"s3_ca_bundle: file {config.s3_ca_bundle} does not exist")
    check_credentials(config)
    (named, given), endpoint = s3_endpoint(config), ""
    if given is None or given.is_far:  # clients of this machine use no proxy
        check_proxies("http_proxy", "https_proxy")  # one is for AWS's source of credentials
    settings = _client_config(config)
    try:
        core = botocore.session.get_session()
        session = boto3.session.Session(region_name=aws_region(config), botocore_session=core)
        client: S3Client = session.client(
            "s3",
            endpoint_url=config.s3_endpoint_url,
            region_name=(session.region_name or DEFAULT_REGION).strip(),
            aws_access_key_id=config.s3_access_key_id,
            aws_secret_access_key=config.s3_secret_access_key,
            config=settings,
        )
        endpoint = client.meta.endpoint_url
        bundle = config.s3_ca_bundle or core.get_config_variable("ca_bundle")
    except BotoCoreError as exc:
        raise ConfigError(f"cannot create the S3 client: {exc}") from exc
    except ValueError:
        pass  # it quotes the endpoint, so it must not be chained
    if not endpoint:
        raise ConfigError(
            f"{named}: the AWS client refuses it; write http://HOST:PORT or https://HOST:PORT, the "
            "host in letters, digits, dots and hyphens"
        )
    check_endpoint(config, endpoint, named)
    connections = _connections(endpoint, settings, bundle)
    events: Any = client.meta.events
    events.register("before-send.s3", partial(_send, connections))
    events.register_first("needs-retry.s3", _repeat_in_time)
    return S3Access(client, connections)


def _connections(endpoint: str, settings: Any, bundle: Path | str | None) -> Connections:
    proxy = proxy_of(endpoint)
    if proxy is not None and proxy.scheme != "http":
        raise ConfigError(
            f"the proxy of {endpoint} is a {proxy.scheme} proxy: objkv reaches S3 only through "
            "proxies of http://, which pass TLS on; correct http_proxy or https_proxy, or name "
            "the endpoint in no_proxy"
        )
    ca = None
    if endpoint.startswith("https:"):
        # As the client would choose it.
        ca = str(bundle or os.environ.get("REQUESTS_CA_BUNDLE") or get_cert_path(True))
    try:
        return Connections(connect_s=settings.connect_timeout, read_s=settings.read_timeout, ca=ca)
    except OSError as exc:
        raise ConfigError(f"{ca}: no certificates of authorities: {exc}") from exc


def _send(connections: Connections, request: Any, **_: object) -> AWSResponse:
    """Send a request of the client, and return the response with its body."""
    if time.monotonic() > _LAST_S.get():
        raise StoreUnavailable("too little time left before the deadline to send a request")
    place = urlsplit(request.url)
    fields = {"Host": host_of(place)}
    for name, text in request.headers.items():
        if name.lower() != "expect":
            fields[name] = text.decode("latin-1") if isinstance(text, bytes) else text
    check_headers(*fields.values())
    target = place._replace(scheme="", netloc="", path=place.path or "/").geturl()
    lines = "".join([f"{name}: {text}\r\n" for name, text in fields.items()])
    head = f"{request.method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")
    body = getattr(request.body, "read", lambda: request.body or b"")()
    end_s = ends_s()
    with connections.ask(
        f"{place.scheme}://{place.netloc}",
        head,
        end_s,
        body=(lambda: memoryview(body)) if body else None,
    ) as response:
        content = _Body(response.read(end_s))
    is_told = response.status not in _ELSEWHERE or "x-amz-bucket-region" in response.headers
    if request.method == "HEAD" and not is_told:  # the client would ask again, and again
        raise ConnectionFailed("the server redirects, and does not say to which region")
    headers: Any = HeadersDict(response.headers)
    return AWSResponse(request.url, response.status, headers, content)


class _Body(io.BytesIO):
    def stream(self) -> Iterator[bytes]:
        """Yield all of it, as the client reads responses."""
        yield self.getvalue()


def check_headers(*texts: str) -> None:
    """Raise ``StoreDenied`` if a header cannot be sent, which only credentials cause. It is not
    quoted."""
    if not all(is_plain(text.replace(" ", "")) for text in texts if text):
        raise StoreDenied(
            "the AWS credentials contain a line break or a character other than ASCII: correct "
            "them in the AWS profile or role"
        )


@contextmanager
def begun_by(last_s: float, end_s: float = math.inf) -> Iterator[None]:
    """Start no attempt of a client of ``open_s3_access`` after ``last_s``, a time of
    ``time.monotonic``: instead raise ``StoreUnavailable``, or the error that would have been
    retried. Interrupt attempts at ``end_s``, or earlier if an outer call ends earlier."""
    token = _LAST_S.set(last_s)
    try:
        with EndsBy(end_s):
            yield
    finally:
        _LAST_S.reset(token)


def _repeat_in_time(
    response: Any, operation: Any, attempts: int, caught_exception: Exception | None, **_: object
) -> None:
    """Raise the error if the client, which has no deadline, might wait past it before a retry."""
    wait_s = 2 ** (attempts - 1)  # the client's longest wait, after SlowDown
    if time.monotonic() + wait_s <= _LAST_S.get():
        return
    if caught_exception is not None:
        raise caught_exception
    status, parsed = response[0].status_code, response[1]
    code = parsed.get("Error", {}).get("Code", "")
    if status == 429 or status >= 500 or code in _LATER:
        raise ClientError(parsed, operation.name)


def _client_config(config: Config) -> ClientConfig:
    attempt_s = config.load_deadline_ms / 1000 * _ATTEMPT_SHARE
    return ClientConfig(
        connect_timeout=attempt_s * _CONNECT_SHARE,
        read_timeout=attempt_s * (1 - _CONNECT_SHARE),
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS - 1},
        # Payloads have their own checksums, and many servers refuse or ignore S3's. A hash of the
        # body in the signature triples the time of a put on loopback: see decision 9.
        s3={
            "addressing_style": config.s3_addressing,
            "payload_signing_enabled": config.s3_signed_payloads,
        },
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra=f"objkv/{version('objkv')}",
    )


def error_code(exc: ClientError) -> tuple[int, str]:
    """Return the HTTP status and S3's error code (``""`` if the response had none)."""
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(exc.response.get("Error", {}).get("Code", ""))


def asks_for_later(exc: ClientError) -> bool:
    """Whether the server can probably serve the request later."""
    status, code = error_code(exc)
    return status == 429 or status >= 500 or code in _LATER


def is_busy(exc: ClientError) -> bool:
    """Whether the server has too much to do."""
    status, code = error_code(exc)
    return status in (429, 503) or code in _BUSY


def is_missing(exc: ClientError) -> bool:
    """Whether the response means that the key does not exist. The response to a HEAD has no S3
    code."""
    status, code = error_code(exc)
    return status == 404 and code in ("NoSuchKey", "NotFound", "404")


@contextmanager
def translated(verb: str, place: str) -> Iterator[None]:
    """Raise the client's exceptions as ``StoreError``. ``place`` is used in the message."""
    try:
        yield
    except ClientError as exc:
        raise _answered(f"{verb} {place}", exc) from exc
    except (NoCredentialsError, PartialCredentialsError, NoAuthTokenError) as exc:
        raise StoreDenied(
            f"{verb} {place}: {exc}: set s3_access_key_id and s3_secret_access_key, or give "
            "this process an AWS role or profile"
        ) from exc
    except SSLError as exc:
        raise _untrusted(f"{verb} {place}", exc) from exc
    except (ClientConnectionError, HTTPClientError) as exc:
        raise StoreUnavailable(f"{verb} {place}: {exc}{_connection_fix(exc)}") from exc
    except (CredentialRetrievalError, TokenRetrievalError) as exc:
        raise StoreUnavailable(
            f"{verb} {place}: AWS credentials are temporarily unavailable: {exc}"
        ) from exc
    except ParamValidationError as exc:
        raise StoreDenied(f"{verb} {place}: {exc}: correct bulk_url") from exc
    except BotoCoreError as exc:
        raise StoreError(f"{verb} {place}: {exc}") from exc


def _answered(what: str, exc: ClientError) -> StoreError:
    status, code = error_code(exc)
    reason = f"{what}: HTTP {status} {code}".rstrip()
    demands = _DEMANDS if what.startswith("put") else ""
    if code in _FIX:
        fix = _FIX[code] + (demands if code == "AccessDenied" else "")
        return StoreDenied(f"{reason}: {fix}")
    if is_busy(exc):
        return StoreBusy(reason)
    if asks_for_later(exc):
        return StoreUnavailable(reason)
    if status in (301, 307):
        return StoreDenied(f"{reason}: {_FIX['PermanentRedirect']}")
    if status in (401, 403):
        return StoreDenied(f"{reason}: {_FIX['AccessDenied']}{demands}")
    return StoreError(f"{reason}: {exc.response.get('Error', {}).get('Message', '')}")


def _untrusted(what: str, exc: SSLError) -> StoreError:
    text = str(exc)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        fix = "set s3_ca_bundle to the PEM file of the CA that signed the server's certificate"
        return StoreDenied(f"{what}: {fix} ({text})")
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return StoreDenied(f"{what}: the endpoint does not support TLS: use http:// ({text})")
    return StoreUnavailable(f"{what}: {text}")


def _connection_fix(exc: BotoCoreError) -> str:
    cause = str(exc.kwargs.get("error", ""))
    if "resolve" in cause or "Name or service not known" in cause:
        return ": the host name does not resolve; check s3_endpoint_url and DNS"
    if "refused" in cause:
        return ": the connection was refused; check s3_endpoint_url and that the server runs"
    return ""


@dataclass(frozen=True, slots=True)
class CallDeadline:
    """The deadline of one call, in times of ``time.monotonic``."""

    end_s: float
    last_s: float
    """No attempt of the client starts after this."""
    abort_s: float
    """An upload that is incomplete by then is aborted, because the abort takes time too."""

    @classmethod
    def of(cls, deadline_s: float) -> "CallDeadline":
        """Return the deadline of a call that begins now: ``deadline_s`` seconds, or less if the
        caller has less time. A call that only tests whether the server has recovered makes one
        attempt."""
        now_s = time.monotonic()
        end_s = min(now_s + deadline_s, ends_s())
        left_s = max(0.0, end_s - now_s)
        attempt_s = left_s * _ATTEMPT_SHARE
        last_s = now_s + attempt_s / 2 if is_trial() else end_s - attempt_s
        return cls(end_s, last_s, end_s - left_s * _ABORT_SHARE)
