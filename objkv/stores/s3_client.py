"""Opens the S3 client as the settings say, and translates what it raises.

The client keeps credentials, signing, TLS, retries and the connection pool; nothing but this module
and ``s3.py`` knows its exceptions.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import boto3
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

from objkv.config import Config, refuse_clear
from objkv.config.urls import passwords_in
from objkv.errors import ConfigError, StoreBusy, StoreDenied, StoreError, StoreUnavailable
from objkv.secrecy import keep_secret
from objkv.sockets import EndsBy
from objkv.stores.s3_body import BodyLost
from objkv.stores.s3_connections import make_punctual

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

ATTEMPTS = 3
"""Of the client. Before them comes one that goes around its layers."""
DEFAULT_REGION = "us-east-1"
# Of the deadline: the rest is what the client waits between attempts.
_ATTEMPTS_SHARE = 0.9
_CONNECT_SHARE = 1 / 3

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
    make_punctual(client)
    client.meta.events.register("before-send.s3", _begin_in_time)
    client.meta.events.register_first("needs-retry.s3", _repeat_in_time)
    return client


@contextmanager
def begun_by(last_s: float, end_s: float = math.inf) -> Iterator[None]:
    """No attempt of a client of ``open_s3_client`` begins after ``last_s``, a time of
    ``time.monotonic``: ``StoreUnavailable``, or the error that would be tried again. None goes on
    after ``end_s``."""
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
    wait_s = 2 ** (attempts - 1)  # the client's longest, after being told to slow down
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
    """Whether the answer says nothing but that the server cannot for now."""
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
