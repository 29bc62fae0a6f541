"""Exceptions of the AWS client, which no other package uses: what they mean, and what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

from objkv.errors import StoreBusy, StoreDenied, StoreError, StoreUnavailable

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
    "NotImplemented": "the server lacks what objkv needs, probably PUT with If-None-Match: *; "
    "docs/stores.md lists servers that have it",
    "EntityTooLarge": "the server rejects values of this size: lower chunk_tokens, or raise "
    "the server's limit to 64 MiB",
    "InvalidObjectState": "the object was moved to an archive: remove the lifecycle rule that does "
    "this",
}
_DEMANDS = (
    "; a bucket may also demand encryption (s3_sse), an ACL (s3_acl), a checksum (s3_checksum) or "
    "signed bodies (s3_signed_payloads)"
)
"""Added to a refused put: S3 does not say which condition of a policy failed."""
_BUSY = {"SlowDown", "Throttling"}
_LASTING = (501, 507)
"""Not implemented, and without room: the same request fails again."""
_LATER = {"RequestTimeout", "RequestTimeoutException", *_BUSY}


def error_code(exc: ClientError) -> tuple[int, str]:
    """Return the HTTP status and S3's error code (``""`` if the response had none)."""
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(exc.response.get("Error", {}).get("Code", ""))


def error_of(method: str, status: int, body: bytes) -> ClientError:
    """Return the error of a response as the client would."""
    found = dict(re.findall(r"<(Code|Message)>([^<]*)</", body.decode(errors="replace")))
    answer: Any = {
        "Error": {"Code": str(status), "Message": "", **found},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, method)


def asks_for_later(exc: ClientError) -> bool:
    """Whether the server can probably serve the request later."""
    status, code = error_code(exc)
    return status == 429 or (status >= 500 and status not in _LASTING) or code in _LATER


def is_busy(exc: ClientError) -> bool:
    """Whether the server has too much to do."""
    status, code = error_code(exc)
    return status in (429, 503) or code in _BUSY


@contextmanager
def translated(verb: str, place: str) -> Iterator[None]:
    """Raise the client's exceptions as ``StoreError``. ``place`` is part of the message."""
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
    if status == 507 or "Quota" in code:  # providers have codes of their own
        code = "QuotaExceeded"
    if fix := _FIX.get("NotImplemented" if status == 501 else code):
        return StoreDenied(f"{reason}: {fix}{demands if code == 'AccessDenied' else ''}")
    if is_busy(exc):
        return StoreBusy(reason)
    if asks_for_later(exc):
        return StoreUnavailable(reason)
    if status in (301, 302, 307):
        return StoreDenied(f"{reason}: {_FIX['PermanentRedirect']}")
    if status in (401, 403):
        return StoreDenied(f"{reason}: {_FIX['AccessDenied']}{demands}")
    return StoreError(f"{reason}: {exc.response.get('Error', {}).get('Message', '')}")


def _untrusted(what: str, exc: SSLError) -> StoreError:
    text = str(exc)
    if "Hostname mismatch" in text or "IP address mismatch" in text:
        fix = "use a name of the server's certificate as the host of s3_endpoint_url"
    elif "CERTIFICATE_VERIFY_FAILED" in text:
        fix = "set s3_ca_bundle to the PEM file of the CA that signed the server's certificate"
    elif "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        fix = "the endpoint does not support TLS: use http://"
    else:
        return StoreUnavailable(f"{what}: {text}")
    return StoreDenied(f"{what}: {fix} ({text})")


def _connection_fix(exc: BotoCoreError) -> str:
    cause = str(exc.kwargs.get("error", ""))
    if any(text in cause for text in ("resolve", "resolution", "Name or service not known")):
        return ": the host name does not resolve; check s3_endpoint_url and DNS"
    if "refused" in cause:
        return ": the connection was refused; check s3_endpoint_url and that the server runs"
    return ""
