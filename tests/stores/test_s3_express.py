"""Directory buckets of S3 Express: separate sessions, and listings of whole folders only.

No server for them can be installed, so this is a simulation from the documentation: every request
except the one for a session must carry its token, and be signed with its key for the service
``s3express``; a listing whose prefix is not a folder is refused.
"""

import hmac
from collections.abc import Iterator
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders

from objkv.config import Config
from objkv.errors import StoreDenied
from objkv.stores.base import PruneStore
from objkv.stores.s3.client import open_s3_client
from objkv.stores.s3.store import S3Store
from tests.contracts.store_contract import StoreContract
from tests.support.servers.quick_s3 import Answer, QuickS3, Request
from tests.support.servers.quick_s3_values import failure
from tests.support.servers.s3_stores import MIB, PART, pattern, s3_store

BUCKET = "kv--use1-az4--x-s3"
KEY, SECRET, TOKEN = "SESSIONKEY", "session-secret", "session-token"
SESSION = f"""<?xml version="1.0" encoding="UTF-8"?>
<CreateSessionResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Credentials>
<SessionToken>{TOKEN}</SessionToken><SecretAccessKey>{SECRET}</SecretAccessKey>
<AccessKeyId>{KEY}</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></CreateSessionResult>"""


class DirectoryBucket:
    """Wraps ``QuickS3``, and accepts only requests that a directory bucket would."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.sessions = 0
        self.refused = ""
        """If not empty, the code of the answer to every request with a session."""

    def __call__(self, request: Request) -> Answer | None:
        if "session" in request.query:
            self.sessions += 1
            body = memoryview(SESSION.encode())
            return Answer(200, {"Content-Type": "application/xml"}, (body,))
        self.requests.append(request)
        if request.headers.get("x-amz-s3session-token") != TOKEN:
            return failure(403, "AccessDenied")
        if not _is_signed(request):
            return failure(403, "SignatureDoesNotMatch")
        if self.refused:
            return failure(403, self.refused)
        is_listing = request.key.strip("/") == BUCKET and request.method == "GET"
        if is_listing and not ("/" + request.query.get("prefix", "")).endswith("/"):
            return failure(400, "InvalidArgument")
        return None


def _is_signed(request: Request) -> bool:
    """Whether the signature, version 4, is that of the session."""
    parts = dict(
        one.strip().split("=", 1)
        for one in request.headers["authorization"].partition(" ")[2].split(",")
    )
    key_id, *scope = parts["Credential"].split("/")
    if key_id != KEY or scope[2:] != ["s3express", "aws4_request"]:
        return False
    names = parts["SignedHeaders"].split(";")
    lines = "".join(f"{name}:{request.headers[name]}\n" for name in names)
    pairs = [f"{quote(k, '~')}={quote(v, '~')}" for k, v in request.query.items()]
    path = request.target.partition("?")[0]
    hashed = request.headers["x-amz-content-sha256"]
    text = "\n".join(
        [request.method, path, "&".join(sorted(pairs)), lines, parts["SignedHeaders"], hashed]
    )
    secret = b"AWS4" + SECRET.encode()
    for part in scope:
        secret = hmac.digest(secret, part.encode(), "sha256")
    told = "\n".join(
        [
            "AWS4-HMAC-SHA256",
            request.headers["x-amz-date"],
            "/".join(scope),
            sha256(text.encode()).hexdigest(),
        ]
    )
    return hmac.digest(secret, told.encode(), "sha256").hex() == parts["Signature"]


@pytest.fixture
def bucket() -> DirectoryBucket:
    return DirectoryBucket()


@pytest.fixture
def store(bucket: DirectoryBucket) -> Iterator[S3Store]:
    with QuickS3(intercept=bucket) as server, s3_store(server.url, bucket=BUCKET) as store:
        yield store


class TestDirectoryBucketStore(StoreContract):
    @pytest.fixture
    def store(self, store: S3Store) -> PruneStore:
        return store

    test_scan_passes_page_boundaries = None  # slow, and no other than in other buckets


def test_every_request_is_signed_with_the_session_and_one_session_serves_all(
    bucket: DirectoryBucket, store: S3Store
) -> None:
    large = pattern(PART + MIB)
    assert store.put_if_absent("ns/a", b"small")
    assert store.put_if_absent("ns/b", large)
    assert not store.put_if_absent("ns/a", b"other")
    buffer = memoryview(bytearray(len(large)))
    assert store.get_into("ns/b", buffer) == len(large)
    assert buffer == large
    assert store.get("ns/none") is None
    assert bucket.sessions == 1
    assert len(bucket.requests) > 5


def test_a_scan_asks_for_whole_folders_and_leaves_out_the_rest(
    bucket: DirectoryBucket, store: S3Store
) -> None:
    for key in ("ns/ab/abc", "ns/ab/abd", "ns/ab/b", "nt/x"):
        store.put(key, b"x")
    assert sorted(entry.key for entry in store.scan("ns/ab/ab")) == ["ns/ab/abc", "ns/ab/abd"]
    assert [entry.key for entry in store.scan("nt")] == ["nt/x"]
    asked = {one.query["prefix"] for one in bucket.requests if "list-type" in one.query}
    assert asked == {"p/ns/ab/", "p/"}


def test_a_refusal_is_no_absence_since_a_session_may_always_see_what_is_missing(
    bucket: DirectoryBucket, store: S3Store
) -> None:
    bucket.refused = "AccessDenied"
    with pytest.raises(StoreDenied):
        store.get("ns/a")
    assert not [one for one in bucket.requests if "list-type" in one.query]


class _Body:
    def __init__(self, text: str) -> None:
        self._text = text.encode()

    def stream(self, **_: object) -> list[bytes]:
        return [self._text]

    def read(self, *_: object, **__: object) -> bytes:
        return self._text


def test_on_aws_the_zone_in_the_name_is_asked_by_tls_and_nothing_else() -> None:
    client = open_s3_client(
        Config(s3_region="us-east-1", s3_access_key_id="key", s3_secret_access_key="secret")
    )
    asked: list[tuple[str, str]] = []

    def answer(request: Any, **_: object) -> AWSResponse:
        asked.append((request.method, request.url))
        told = (200, _Body(SESSION)) if request.url.endswith("?session") else (404, _Body(""))
        return AWSResponse(request.url, told[0], HTTPHeaders(), told[1])

    client.meta.events.register("before-send.s3", answer)
    store = S3Store(client, bucket=BUCKET, prefix="p", multipart_bytes=PART)
    assert store.get_into("ns/a", memoryview(bytearray(1))) is None
    host = f"https://{BUCKET}.s3express-use1-az4.us-east-1.amazonaws.com"
    assert asked == [("GET", f"{host}/?session"), ("GET", f"{host}/p/ns/a")]
    store.close()
