"""A store in a bucket of any S3-compatible service.

A get reads from the socket into the caller's buffer, large values in several ranges at once. A put
is one conditional request, so one of many writers wins. Other requests are boto3's.
"""

import base64
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import ClientError

from objkv.config import Config, is_directory_bucket
from objkv.config.prices import RANGE_BYTES
from objkv.errors import StoreUnavailable
from objkv.stores.base import (
    Arrived,
    Buffer,
    Entry,
    LifecycleRules,
    Unfinished,
    check_prefix,
    copy_into,
    is_key,
)
from objkv.stores.s3.bucket import Bucket
from objkv.stores.s3.client import S3Access, one_call
from objkv.stores.s3.errors import error_code, translated
from objkv.stores.s3.http import VALUE_BYTES_MAX
from objkv.stores.s3.read import S3Reader

_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
CONFLICT_TRIES = 5
_EXISTS = 412
_CONFLICT = 409
RANGES_MAX = 56
"""Threads that help with large values. With ``load_threads`` 8 an agent has 64 connections for
them, of which S3 gives each about 85 MB/s; more gain nothing (``docs/scaling.md``)."""


class S3Store:
    """Values as objects ``<prefix>/<key>`` in ``bucket``. Closing the store closes ``access``.

    ``If-None-Match: *`` decides between writers, so the server must honour it. A put that was
    repeated because its response was lost finds the value that it has written, and returns False.

    ``load_deadline_ms`` bounds each call, and so does an enclosing ``EndsBy``: no attempt starts
    that may exceed it, and nothing continues after it.
    """

    def __init__(
        self,
        access: S3Access,
        config: Config,
        *,
        bucket: str,
        prefix: str,
        range_bytes: int = RANGE_BYTES,
        ranges_max: int = RANGES_MAX,
    ) -> None:
        """Values above ``range_bytes`` are read by the caller and ``ranges_max`` threads."""
        self._access = access
        self._client: Any = access.client  # a verb is a variable below
        self._deadline_s = config.load_deadline_ms / 1000
        folder = f"{prefix.strip('/')}/".removeprefix("/")
        self._bucket = Bucket(access, bucket, folder)
        self._reader = S3Reader(self._bucket, range_bytes=range_bytes, threads_max=ranges_max)
        self._config = config

    @property
    def _endpoint(self) -> str:
        return str(self._client.meta.endpoint_url)

    @property
    def uses_tls(self) -> bool:
        return self._endpoint.startswith("https:")

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        is_whole = end is None and not start
        room = (VALUE_BYTES_MAX if end is None else end) - start
        if room <= 0:  # an HTTP range cannot be empty
            return None if self.head(key) is None else b""
        with self._call("get", key):
            found = self._reader.read(key, None if is_whole else start, room=room)
        return None if found is None else bytes(found)

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """Read from the socket into ``buffer``. The length is checked before and after."""
        if start is not None and not len(buffer):
            found = self.get(key, start, start)
            return None if found is None else copy_into(key, found, buffer, arrived)
        with self._call("get_into", key):
            read = self._reader.read(key, start, buffer=buffer, arrived=arrived)
        return None if read is None else len(read)

    def head(self, key: str) -> Entry | None:
        """Return None also for a missing bucket: a HEAD's response does not tell."""
        with self._call("head", key):
            found = self._bucket.head(key)
        if found is None:
            return None
        return Entry(key, found["ContentLength"], found["LastModified"].timestamp())

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Yield entries in key order, with one page of 1000 in memory. Directory buckets have no
        order and list whole folders, so the whole folder is read."""
        check_prefix(prefix)
        listed = prefix
        if is_directory_bucket(self._bucket.name):
            listed = prefix[: prefix.rfind("/") + 1]
        for page in self._pages(listed):
            for found in page.get("Contents", ()):
                key = found["Key"].removeprefix(self._bucket.prefix)
                if is_key(key) and key.startswith(prefix):
                    yield Entry(key, found["Size"], found["LastModified"].timestamp())

    def folders(self, folder: str) -> list[str]:
        """Return the folder names, with one request per 1000 names."""
        prefix = f"{folder}/" if folder else ""
        check_prefix(prefix)
        start = len(self._bucket.prefix) + len(prefix)
        names = [
            found["Prefix"][start:].removesuffix("/")
            for page in self._pages(prefix, Delimiter="/")
            for found in page.get("CommonPrefixes", ())
        ]
        return sorted(name for name in names if is_key(name))

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """Make one conditional request, and another if it conflicts with another writer's."""
        with self._call("put_if_absent", key), memoryview(value) as view:
            for _ in range(CONFLICT_TRIES):
                try:
                    self._put(key, view, {"if-none-match": "*"})
                    return True
                except ClientError as exc:
                    status, _ = error_code(exc)
                    if status not in (_EXISTS, _CONFLICT):
                        raise
                if status == _EXISTS or self._bucket.head(key) is not None:
                    return False
            raise StoreUnavailable(
                f"put_if_absent {key}: {CONFLICT_TRIES} conflicts with other writers, retry later"
            )

    def put(self, key: str, value: Buffer) -> None:
        with self._call("put", key), memoryview(value) as view:
            self._put(key, view, {})

    def _put(self, key: str, value: memoryview, condition: dict[str, str]) -> None:
        extra = put_headers(self._config, value) | condition
        with self._bucket.ask("PUT", key, extra, value) as response:
            response.read()

    def delete(self, key: str) -> bool:
        """Always returns True, because S3 does not report whether the object existed."""
        with self._call("delete", key):
            self._client.delete_object(**self._bucket.object_of(key))
        return True

    def unfinished(self) -> Iterator[Unfinished]:
        """Yield nothing: a put is one request, which leaves nothing behind."""
        return iter(())

    def discard(self, unfinished: Unfinished) -> bool:
        """Return False: there are no leftovers."""
        return False

    def lifecycle(self) -> LifecycleRules:
        """Return what the bucket's lifecycle rules do to values below the prefix. Raises
        ``StoreDenied`` without ``s3:GetLifecycleConfiguration``."""
        name = self._bucket.name
        with self._call("lifecycle", name):
            try:
                found = self._client.get_bucket_lifecycle_configuration(Bucket=name)
            except ClientError as exc:
                if error_code(exc)[1] != "NoSuchLifecycleConfiguration":
                    raise
                return LifecycleRules(None, None)
        ours = self._bucket.prefix
        rules = [rule for rule in found.get("Rules", ()) if _applies(rule, ours)]
        expiries = [rule.get("Expiration", {}) for rule in rules]
        moves = [move for rule in rules for move in rule.get("Transitions", ())]
        return LifecycleRules(
            expire_days=_fewest([*expiries, *({"Days": 0} for one in expiries if "Date" in one)]),
            archive_days=_fewest([one for one in moves if one.get("StorageClass") in _ARCHIVES]),
        )

    def check(self) -> None:
        """List one object: unlike a HEAD's, the response reports the error."""
        name, prefix = self._bucket.name, self._bucket.prefix
        with self._call("check", f"s3://{name} at {self._endpoint}"):
            self._bucket.endpoint()
            self._client.list_objects_v2(Bucket=name, Prefix=prefix, MaxKeys=1)

    def close(self) -> None:
        """End the threads. Close the client and the connections."""
        self._reader.close()
        self._access.close()

    @contextmanager
    def _call(self, verb: str, what: str) -> Iterator[None]:
        with one_call(self._deadline_s), translated(verb, what):
            yield

    def _pages(self, below: str, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing, each with a deadline of its own."""
        start = self._bucket.prefix + below
        lister = self._client.get_paginator("list_objects_v2")
        pages = iter(lister.paginate(Bucket=self._bucket.name, Prefix=start, **options))
        while True:
            with self._call("list_objects_v2", start or self._bucket.name):
                page = next(pages, None)
            if page is None:
                return
            yield page


def put_headers(config: Config, value: memoryview) -> dict[str, str]:
    """Return the headers of a put of ``value`` that the settings demand."""
    given = {
        "content-length": str(len(value)),
        "x-amz-server-side-encryption": config.s3_sse,
        "x-amz-server-side-encryption-aws-kms-key-id": config.s3_sse_kms_key_id,
        "x-amz-acl": config.s3_acl,
    }
    headers = {name: text for name, text in given.items() if text}
    if config.s3_checksum is not None:
        if config.s3_checksum == "crc32":
            digest = zlib.crc32(value).to_bytes(4, "big")
        else:
            digest = hashlib.sha256(value).digest()
        headers[f"x-amz-checksum-{config.s3_checksum}"] = base64.b64encode(digest).decode()
    if config.s3_signed_payloads:
        headers["x-amz-content-sha256"] = hashlib.sha256(value).hexdigest()
    return headers


def _applies(rule: dict[str, Any], ours: str) -> bool:
    """Whether a rule is on and covers payloads below the prefix ``ours``, which have no tags."""
    chosen = rule.get("Filter", {})
    chosen = chosen.get("And", chosen)
    prefix = chosen.get("Prefix", rule.get("Prefix", ""))
    return (
        rule.get("Status") == "Enabled"
        and not chosen.keys() & {"Tag", "Tags"}
        and (prefix.startswith(ours) or ours.startswith(prefix))
        and not prefix.startswith(f"{ours}quarantine")
    )


def _fewest(places: Sequence[dict[str, Any]]) -> int | None:
    return min((one["Days"] for one in places if "Days" in one), default=None)
