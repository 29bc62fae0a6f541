"""A store in a bucket of anything that speaks S3.

A get reads from the socket into the caller's buffer, large values by several ranges at once. A put
is one conditional request, so that one of many writers wins; values above ``multipart_bytes`` go up
in parts. What is not ordinary in either is left to the client.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from objkv.config import is_directory_bucket, without_password
from objkv.stores.base import (
    Arrived,
    Buffer,
    Entry,
    Unfinished,
    check_key,
    check_prefix,
    copy_into,
    is_key,
)
from objkv.stores.s3.client import CallDeadline, attempt_s, error_code, head, translated
from objkv.stores.s3.helpers import HelperPool
from objkv.stores.s3.http import NoAnswer
from objkv.stores.s3.read import Get, S3Reader
from objkv.stores.s3.wire import Hedge, Wire
from objkv.stores.s3.write import S3Writer
from objkv.telemetry import NullRecorder, Recorder

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


class S3Store:
    """Values as objects ``<prefix>/<key>`` of ``bucket``; closes ``client`` with itself.

    ``If-None-Match: *`` decides among writers. Servers that refuse it, or take it and ignore it
    (found out by repeating the first put that succeeded), get HEAD and PUT instead, counted as
    ``s3_unconditional_puts``: two writers at one moment may then both get True. So may two
    writers of a value above ``multipart_bytes`` on a server that ignores the condition when an
    upload is completed (Ceph 16). A put whose answer was lost and that the client repeated
    gets False though it wrote.

    Values above ``range_bytes`` are read by ranges, and parts are uploaded, by the caller and up to
    ``ranges_max`` threads of the store. ``hedge_percent_max``: see ``Hedge``. ``is_direct``: False
    leaves every request to the client, as a directory bucket of S3 Express always does: the client
    opens sessions there and signs with them.

    ``deadline_s`` bounds each call, and so does ``EndsBy`` around it: no attempt is begun that may
    take longer, and nothing goes on after it. Reads need the permission to list: without it S3
    answers 403 instead of 404 for what is not there.
    """

    def __init__(
        self,
        client: "S3Client",
        *,
        bucket: str,
        prefix: str,
        multipart_bytes: int,
        range_bytes: int = 8 << 20,
        ranges_max: int = 0,
        hedge_percent_max: int = 0,
        deadline_s: float = 30.0,
        is_direct: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self._client: Any = client  # which verb is a variable here
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/".removeprefix("/")
        self._deadline_s, self._attempt_s = deadline_s, attempt_s(client, deadline_s)
        self._is_directory = is_directory_bucket(bucket)
        is_direct = is_direct and not self._is_directory
        recorder = recorder or NullRecorder()
        hedge, place = Hedge(hedge_percent_max), (bucket, self._prefix)
        self._pool = HelperPool(ranges_max)
        self._wire = Wire(client, place, hedge, is_direct=is_direct, recorder=recorder)
        self._reader = S3Reader(client, self._wire, self._pool, range_bytes=range_bytes)
        self._writer = S3Writer(
            client, self._wire, self._pool, multipart_bytes=multipart_bytes, recorder=recorder
        )

    def __repr__(self) -> str:
        return f"<S3Store s3://{self._bucket}/{self._prefix} at {self._endpoint}>"

    @property
    def _endpoint(self) -> str:
        return without_password(self._client.meta.endpoint_url)

    @property
    def conditional_puts(self) -> bool | None:
        """Whether the server honours ``If-None-Match``; None until the first put found out."""
        return self._writer.conditional

    def get(self, key: str) -> bytes | None:
        """The whole object, or None."""
        with translated("get", key):
            return self._reader.get(self._place(key), self._deadline())

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes ``[start, end)`` by one ranged request, or None."""
        if end <= start:
            return None if self.head(key) is None else b""
        with translated("get_range", key):
            return self._reader.get(self._place(key), self._deadline(), start, end)

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """Read from the socket into ``buffer``; more than ``range_bytes`` by ranges on several
        connections. The length is checked before and after."""
        place, deadline = self._place(key), self._deadline()
        if start is not None and not len(buffer):  # no request for a range is empty
            found = self.get_range(key, start, start)
            return None if found is None else copy_into(key, found, buffer, arrived)
        get = Get(place, key, start, buffer, arrived, deadline)
        with translated("get_into", key):
            with suppress(NoAnswer):
                return self._reader.read(get)
            return self._reader.read_by_client(get)

    def head(self, key: str) -> Entry | None:
        """Size and age of the object, or None. A missing bucket is None as well: the answer to a
        HEAD does not tell one from the other."""
        place = self._place(key)
        with self._deadline().client():
            found = head(self._client, place, key)
        if found is None:
            return None
        return Entry(key, found["ContentLength"], found["LastModified"].timestamp())

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Entries in key order, a page of 1000 in memory; objects that are no keys are left out.

        Directory buckets have no order, and list whole folders: all of the folder is looked at."""
        check_prefix(prefix)
        listed = prefix[: prefix.rfind("/") + 1] if self._is_directory else prefix
        for page in self._pages("list_objects_v2", listed):
            for found in page.get("Contents", ()):
                key = found["Key"].removeprefix(self._prefix)
                if is_key(key) and key.startswith(prefix):
                    yield Entry(key, found["Size"], found["LastModified"].timestamp())

    def folders(self, folder: str) -> list[str]:
        """A request per 1000 names."""
        prefix = f"{folder}/" if folder else ""
        check_prefix(prefix)
        start = len(self._prefix) + len(prefix)
        names = [
            found["Prefix"][start:].removesuffix("/")
            for page in self._pages("list_objects_v2", prefix, Delimiter="/")
            for found in page.get("CommonPrefixes", ())
        ]
        return sorted(name for name in names if is_key(name))

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """One conditional request; see the class for servers that have none."""
        place = self._place(key)
        with translated("put_if_absent", key), memoryview(value) as view:
            return self._writer.put_if_absent(place, key, view, self._deadline())

    def put(self, key: str, value: Buffer) -> None:
        """One request, or an upload in parts."""
        place = self._place(key)
        with translated("put", key), memoryview(value) as view:
            self._writer.put(place, key, view, self._deadline())

    def delete(self, key: str) -> bool:
        """Remove the object. S3 does not tell whether there was one: always True."""
        place = self._place(key)
        with self._deadline().client(), translated("delete", key):
            self._client.delete_object(**place)
        return True

    def unfinished(self) -> Iterator[Unfinished]:
        """Uploads in parts that were not completed. The size of each costs a request of its own."""
        for page in self._pages("list_multipart_uploads", ""):
            for found in page.get("Uploads", ()):
                key, name = found["Key"].removeprefix(self._prefix), found["UploadId"]
                if is_key(key):
                    parts = self._pages("list_parts", key, Key=found["Key"], UploadId=name)
                    sizes = (int(part["Size"]) for page in parts for part in page.get("Parts", ()))
                    yield Unfinished(key, name, sum(sizes), found["Initiated"].timestamp())

    def discard(self, unfinished: Unfinished) -> bool:
        """Abort the upload, and free its parts."""
        place = self._place(unfinished.key)
        with self._deadline().client(), translated("discard", unfinished.key):
            try:
                self._client.abort_multipart_upload(**place, UploadId=unfinished.name)
            except ClientError as exc:
                if error_code(exc)[0] == 404:
                    return False
                raise
        return True

    def check(self) -> None:
        """List one object: the answer to a listing names what is wrong, that to a HEAD does not."""
        where = f"s3://{self._bucket} at {self._endpoint}"
        with self._deadline().client(), translated("check", where):
            self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)

    def close(self) -> None:
        """End the threads; close the client and its connections."""
        self._pool.close()
        self._wire.close()
        self._client.close()

    def _place(self, key: str) -> dict[str, Any]:
        """Bucket and key as the client wants them."""
        check_key(key)
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _deadline(self) -> CallDeadline:
        return CallDeadline.of(self._deadline_s, self._attempt_s)

    def _pages(self, verb: str, below: str, **options: Any) -> Iterator[dict[str, Any]]:
        """The pages of a listing of what begins with ``below``; each request has a deadline of its
        own."""
        start = self._prefix + below
        if verb != "list_parts":
            options["Prefix"] = start
        lister = self._client.get_paginator(verb)
        pages = iter(lister.paginate(Bucket=self._bucket, **options))
        while True:
            with self._deadline().client(), translated(verb, start or self._bucket):
                try:
                    page = next(pages, None)
                except ClientError as exc:
                    if verb != "list_parts" or error_code(exc)[0] != 404:
                        raise
                    return  # completed or aborted meanwhile
            if page is None:
                return
            yield page
