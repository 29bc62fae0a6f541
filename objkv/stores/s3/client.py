"""Opens the S3 client as the settings say, and translates what it raises.

The client keeps credentials, signing, TLS, retries and the connection pool; no other package knows
its exceptions.
"""

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.client import Config as ClientConfig
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoAuthTokenError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
    TokenRetrievalError,
)
from urllib3.exceptions import HTTPError

from objkv.config import Config, is_directory_bucket, refuse_clear
from objkv.config.urls import passwords_in
from objkv.errors import ConfigError, StoreBusy, StoreDenied, StoreError, StoreUnavailable
from objkv.net.deadline import EndsBy, deadline_socket, ends_s, is_trial
from objkv.redact import keep_secret
from objkv.stores.s3.body import BodyLost

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


PRIVATE_NAMES: Final = {
    "client": ("_endpoint", "_request_signer"),
    "session": (
        "_get_connection_manager",
        "_manager",
        "_pool_classes_by_scheme",
        "_proxy_config",
        "_setup_ssl_cert",
        "_verify",
    ),
    "pool": ("_get_conn", "_put_conn", "_validate_conn"),
    "connection": ("_dns_host", "_new_conn"),
    "body": ("_raw_stream",),
}
"""The private names of botocore and urllib3 that this package uses, by owner. Where a version lacks
one, requests are left to the client, or only its time-outs bound them."""
ATTEMPTS = 3
"""Of the client. Before them comes one that goes around its layers."""
DEFAULT_REGION = "us-east-1"
# Of the deadline: the rest is what the client waits between attempts.
_ATTEMPTS_SHARE = 0.9
_CONNECT_SHARE = 1 / 3
_ATTEMPT_SHARE = 1 / 4
"""Of the time left, at most: where that is short an attempt is cut off rather than not made."""
_ABORT_SHARE = 0.1
_ADDRESS_S = 1.0
"""For connecting to one address of several, at least: a packet lost is sent again after as long."""
_FIX = {
    "NoSuchBucket": "there is no such bucket: create it, or correct bulk_url",
    "AllAccessDisabled": "the bucket is disabled: ask its owner",
    "InvalidBucketName": "this cannot be a bucket's name: correct bulk_url",
    "InvalidAccessKeyId": "the server does not know the access key: check s3_access_key_id "
    "or the AWS credentials in use",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: check "
    "s3_secret_access_key or the AWS credentials in use",
    "ExpiredToken": "the session token has expired: renew the AWS credentials",
    "InvalidToken": "the session token is not valid here: renew the AWS credentials",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's by more than "
    "15 minutes: set it (NTP)",
    "AccessDenied": "the credentials lack a permission: give them the policy that objkv access "
    "prints, or set role to what they may do",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set s3_region",
    "PermanentRedirect": "the bucket is in another region: set s3_region and s3_endpoint_url",
    "IllegalLocationConstraintException": "the bucket is in another region: set s3_region",
    "QuotaExceeded": "the quota is used up: raise it, or remove old payloads",
    "EntityTooLarge": "the server refuses values this large: lower s3_multipart_bytes",
    "InvalidObjectState": "the value was moved to an archive: no lifecycle rule may do that",
}
_LATER = {"RequestTimeout", "RequestTimeoutException", "SlowDown", "Throttling", "NoSuchUpload"}
_BUSY = {"SlowDown", "Throttling"}
_LAST_S: ContextVar[float] = ContextVar("last_s", default=math.inf)


class _PlainConnection(AWSHTTPConnection):
    def _new_conn(self) -> socket.socket:
        return deadline_socket(_first_that_connects(self, super()._new_conn))


class _TlsConnection(AWSHTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return _first_that_connects(self, super()._new_conn)

    def connect(self) -> None:
        super().connect()
        self.sock = deadline_socket(self.sock)


class _PlainPool(AWSHTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _TlsPool(AWSHTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def _first_that_connects(connection: Any, connect: Callable[[], socket.socket]) -> socket.socket:
    """A connection to the first address of the host that accepts one, all within the time-out that
    the client grants to each address."""
    host, timeout_s = connection._dns_host, connection.timeout
    now_s = time.monotonic()
    until_s = min(now_s + timeout_s, ends_s())
    try:
        found = socket.getaddrinfo(host, connection.port, 0, socket.SOCK_STREAM)
    except OSError:
        return connect()  # whose error says that the name is not known
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    try:
        while True:
            left_s = until_s - time.monotonic()
            connection._dns_host = addresses.pop(0)
            connection.timeout = max(
                1e-3, min(left_s, max(_ADDRESS_S, left_s / (len(addresses) + 1)))
            )
            try:
                return connect()
            except HTTPError:
                if not addresses or time.monotonic() >= until_s:
                    raise
    finally:
        connection._dns_host, connection.timeout = host, timeout_s


def keep_deadlines(client: "S3Client") -> bool:
    """``client``, which has no connection yet, makes its connections of deadline sockets. False
    where this version of the client hides them: then only its time-outs bound its requests."""
    pools = {"http": _PlainPool, "https": _TlsPool}
    try:
        session: Any = client._endpoint.http_session  # type: ignore[attr-defined]
        session._manager.pool_classes_by_scheme = pools
        session._pool_classes_by_scheme = pools  # for proxies, whose managers are made later
    except AttributeError:
        return False
    return True


def open_s3_client(config: Config) -> "S3Client":
    """A thread-safe client for the settings; nothing is sent yet.

    A call with all its attempts ends within ``load_deadline_ms``, and within what ``begun_by``
    says. Raises ``ConfigError``.
    """
    if config.s3_ca_bundle is not None and not config.s3_ca_bundle.is_file():
        raise ConfigError(f"s3_ca_bundle: there is no file {config.s3_ca_bundle}")
    region = config.s3_region or (DEFAULT_REGION if config.s3_endpoint_url else None)
    try:
        client: S3Client = boto3.session.Session().client(
            "s3",
            endpoint_url=config.s3_endpoint_url,
            region_name=region,
            verify=None if config.s3_ca_bundle is None else str(config.s3_ca_bundle),
            aws_access_key_id=config.s3_access_key_id,
            aws_secret_access_key=config.s3_secret_access_key,
            config=_client_config(config),
        )
        keep_secret(*passwords_in(client.meta.endpoint_url))
        if not config.allow_plaintext:  # AWS's own settings may name an endpoint as well
            refuse_clear("the endpoint", client.meta.endpoint_url)
    except (BotoCoreError, ValueError) as exc:
        raise ConfigError(f"S3 client: {exc}") from exc
    keep_deadlines(client)
    client.meta.events.register("before-send.s3", _begin_in_time)
    client.meta.events.register_first("needs-retry.s3", _repeat_in_time)
    return client


@contextmanager
def begun_by(last_s: float, end_s: float = math.inf) -> Iterator[None]:
    """No attempt of a client of ``open_s3_client`` begins after ``last_s``, a time of
    ``time.monotonic``: it raises ``StoreUnavailable``, or the error that would be retried. None
    goes on after ``end_s``."""
    token = _LAST_S.set(min(last_s, _LAST_S.get()))
    try:
        with EndsBy(end_s):
            yield
    finally:
        _LAST_S.reset(token)


def attempt_s(client: "S3Client", deadline_s: float) -> float:
    """How long one attempt of ``client`` takes at most, as part of a call of ``deadline_s``."""
    settings: Any = client.meta.config
    return min(float(settings.connect_timeout + settings.read_timeout), deadline_s / 4)


def _begin_in_time(**_: object) -> None:
    if time.monotonic() > _LAST_S.get():
        raise StoreUnavailable("the deadline is too near to ask")


def _repeat_in_time(
    response: Any, operation: Any, attempts: int, caught_exception: Exception | None, **_: object
) -> None:
    """Raise what went wrong if the client, which knows no deadline, might wait past it."""
    wait_s = 2 ** (attempts - 1)  # the client's longest, after SlowDown
    if time.monotonic() + wait_s <= _LAST_S.get():
        return
    if caught_exception is not None:
        raise caught_exception
    status, parsed = response[0].status_code, response[1]
    code = parsed.get("Error", {}).get("Code", "")
    if status == 429 or status >= 500 or code in _LATER:
        raise ClientError(parsed, operation.name)


def _client_config(config: Config) -> ClientConfig:
    attempt_s = config.load_deadline_ms / 1000 * _ATTEMPTS_SHARE / (ATTEMPTS + 1)
    return ClientConfig(
        connect_timeout=attempt_s * _CONNECT_SHARE,
        read_timeout=attempt_s * (1 - _CONNECT_SHARE),
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=config.bulk_calls_max + config.s3_ranges_max,
        tcp_keepalive=True,
        # Payloads carry their own checksums, and many servers refuse or ignore S3's. A hash of the
        # body in the signature would halve the speed of a put: see docs/decisions/0009.
        s3={"addressing_style": config.s3_addressing, "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra=f"objkv/{version('objkv')}",
    )


def error_code(exc: ClientError) -> tuple[int, str]:
    """HTTP status and S3's name of the error (``""`` if the answer had none)."""
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(exc.response.get("Error", {}).get("Code", ""))


def asks_for_later(exc: ClientError) -> bool:
    """Whether the answer only says that the server cannot serve the request now."""
    status, code = error_code(exc)
    return status == 429 or status >= 500 or code in _LATER


def is_missing(exc: ClientError) -> bool:
    """Whether the answer means that the key has no value; a HEAD's answer does not name why."""
    status, code = error_code(exc)
    return status == 404 and code in ("NoSuchKey", "NotFound", "404")


@contextmanager
def translated(verb: str, place: str) -> Iterator[None]:
    """Raise as ``StoreError`` what the client raises inside. ``place`` is for the message."""
    try:
        yield
    except ClientError as exc:
        raise _answered(f"{verb} {place}", exc) from exc
    except BodyLost as exc:
        raise StoreUnavailable(f"{verb} {place}: {exc}") from exc
    except (NoCredentialsError, PartialCredentialsError, NoAuthTokenError) as exc:
        raise StoreDenied(
            f"{verb} {place}: {exc}: set s3_access_key_id and s3_secret_access_key, or give this "
            "process an AWS role or profile"
        ) from exc
    except SSLError as exc:
        raise _untrusted(f"{verb} {place}", exc) from exc
    except (ConnectionError, HTTPClientError, IncompleteReadError) as exc:
        raise StoreUnavailable(f"{verb} {place}: {exc}{_connection_fix(exc)}") from exc
    except HTTPError as exc:  # what botocore lets through while a body is read
        raise StoreUnavailable(f"{verb} {place}: {exc}") from exc
    except (CredentialRetrievalError, TokenRetrievalError) as exc:
        raise StoreUnavailable(f"{verb} {place}: no credentials for now: {exc}") from exc
    except ParamValidationError as exc:
        raise StoreDenied(f"{verb} {place}: {exc}: correct bulk_url") from exc
    except BotoCoreError as exc:
        raise StoreError(f"{verb} {place}: {exc}") from exc


def _answered(what: str, exc: ClientError) -> StoreError:
    status, code = error_code(exc)
    reason = f"{what}: HTTP {status} {code}".rstrip()
    if code in _FIX:
        return StoreDenied(f"{reason}: {_FIX[code]}")
    if status in (429, 503) or code in _BUSY:
        return StoreBusy(reason)
    if asks_for_later(exc):
        return StoreUnavailable(reason)
    if status in (301, 307):
        return StoreDenied(f"{reason}: {_FIX['PermanentRedirect']}")
    if status in (401, 403):
        return StoreDenied(f"{reason}: {_FIX['AccessDenied']}")
    return StoreError(f"{reason}: {exc.response.get('Error', {}).get('Message', '')}")


def _untrusted(what: str, exc: SSLError) -> StoreError:
    text = str(exc)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        fix = "the server's certificate is not trusted: set s3_ca_bundle to the PEM file of its CA"
        return StoreDenied(f"{what}: {fix} ({text})")
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return StoreDenied(f"{what}: the endpoint does not speak TLS: use http:// ({text})")
    return StoreUnavailable(f"{what}: {text}")


def _connection_fix(exc: BotoCoreError) -> str:
    cause = str(exc.kwargs.get("error", ""))
    if "resolve" in cause or "Name or service not known" in cause:
        return ": the host name does not resolve; check s3_endpoint_url and DNS"
    if "refused" in cause:
        return ": nothing listens there; check s3_endpoint_url and that the server runs"
    return ""


@dataclass(frozen=True, slots=True)
class CallDeadline:
    """The deadline of one call; times of ``time.monotonic``."""

    end_s: float
    last_s: float
    """No attempt of the client begins later."""
    abort_s: float
    """An upload that is not over by then is aborted, which takes time as well."""

    @classmethod
    def of(cls, deadline_s: float, attempt_s: float) -> "CallDeadline":
        """Of a call that begins now: ``deadline_s`` seconds, or fewer where the caller has fewer.

        One attempt takes up to ``attempt_s``. A call that only tests whether the server is back
        makes one attempt.
        """
        now_s = time.monotonic()
        end_s = min(now_s + deadline_s, ends_s())
        left_s = max(0.0, end_s - now_s)
        attempt_s = min(attempt_s, left_s * _ATTEMPT_SHARE)
        last_s = now_s + attempt_s / 2 if is_trial() else end_s - attempt_s
        return cls(end_s, last_s, end_s - left_s * _ABORT_SHARE)

    def client(self) -> AbstractContextManager[None]:
        """The client's requests inside begin and end in time."""
        return begun_by(self.last_s, self.end_s)


def head(client: "S3Client", place: dict[str, Any], key: str) -> Any | None:
    """The client's answer to HEAD of ``place``, None if there is no value; ``key`` is for the
    message."""
    with translated("head", key):
        try:
            return client.head_object(**place)
        except ClientError as exc:
            if is_absent(client, place, exc):
                return None
            raise


def is_absent(client: "S3Client", place: dict[str, Any], error: ClientError) -> bool:
    """Whether ``error``, the answer to a request for ``place``, means that nothing is there; raises
    what the client raises but ``ClientError``.

    S3 says 404 for a missing key to everyone who may list it. Where that right has a condition on
    the prefix, some servers (Ceph 16.2) say 403 instead, because a get names no prefix; to those
    that honour the condition a listing of the one key is allowed, and that decides, at the cost of
    one more request. Directory buckets list no single keys; their sessions may see all there is, so
    that a missing key is a 404.
    """
    if is_missing(error):
        return True
    status, code = error_code(error)
    if status != 403 or code not in ("AccessDenied", "403", "Forbidden"):
        return False  # a HEAD's answer does not name why
    if is_directory_bucket(place["Bucket"]):
        return False
    try:
        page = client.list_objects_v2(Bucket=place["Bucket"], Prefix=place["Key"], MaxKeys=1)
    except ClientError:
        return False
    # Listed in order, so that the key itself would be first of all that begin with it.
    return all(found["Key"] != place["Key"] for found in page.get("Contents", ()))
