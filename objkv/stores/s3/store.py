"""A store in a bucket of anything that speaks S3.

A get reads from the socket into the caller's buffer, large values by several ranges at once. A put
is one conditional request, so of many writers one wins; values above ``multipart_bytes`` go up in
parts. What is not ordinary in either is left to the client.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
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
from objkv.stores.s3.body import VALUE_BYTES_MAX, read_all
from objkv.stores.s3.client import Term, attempt_s, error_code, is_absent, open_term, translated
from objkv.stores.s3.helpers import Crew
from objkv.stores.s3.http import NoAnswer
from objkv.stores.s3.read import Ranges, Wanted
from objkv.stores.s3.wire import Hedge, Wire
from objkv.stores.s3.write import Uploads, Writer
from objkv.telemetry import NullRecorder, Recorder

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


# What a bucket lists: objects, what looks like folders, and uploads that nobody has completed.

Page = dict[str, Any]


class Listing:
    """Lists what a bucket has under ``prefix``, which is empty or ends in ``/``. A page of 1000 is
    in memory at a time."""

    def __init__(
        self,
        client: "S3Client",
        bucket: str,
        prefix: str,
        begun_in_time: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``begun_in_time``: entered for each request; bounds when the last attempt begins."""
        self._client: Any = client  # which verb is a variable here
        self._bucket = bucket
        self._prefix = prefix
        self._begun_in_time = begun_in_time

    def pages(self, verb: str, prefix: str, **options: Any) -> Iterator[Page]:
        """Answers to ``verb``, of what begins with the store's prefix and ``prefix``."""
        start = self._prefix + prefix
        lister = self._client.get_paginator(verb)
        pages = iter(lister.paginate(Bucket=self._bucket, Prefix=start, **options))
        while True:
            with self._begun_in_time(), translated(verb, start or self._bucket):
                page = next(pages, None)
            if page is None:
                return
            yield page

    def folders(self, folder: str) -> list[str]:
        """See ``ReadStore.folders``."""
        prefix = f"{folder}/" if folder else ""
        start = len(self._prefix) + len(prefix)
        names = [
            found["Prefix"][start:].removesuffix("/")
            for page in self.pages("list_objects_v2", prefix, Delimiter="/")
            for found in page.get("CommonPrefixes", ())
        ]
        return sorted(name for name in names if is_key(name))

    def unfinished(self) -> Iterator[Unfinished]:
        """Uploads in parts. How many bytes each holds costs a request of its own."""
        for page in self.pages("list_multipart_uploads", ""):
            for found in page.get("Uploads", ()):
                key, name = found["Key"].removeprefix(self._prefix), found["UploadId"]
                if is_key(key):
                    begun_s = found["Initiated"].timestamp()
                    yield Unfinished(key, name, self._part_bytes(found["Key"], name), begun_s)

    def abort(self, unfinished: Unfinished) -> bool:
        """End the upload, and free its parts."""
        place = {"Bucket": self._bucket, "Key": self._prefix + unfinished.key}
        with self._begun_in_time(), translated("discard", unfinished.key):
            try:
                self._client.abort_multipart_upload(**place, UploadId=unfinished.name)
            except ClientError as exc:
                if error_code(exc)[0] == 404:
                    return False
                raise
            return True

    def _part_bytes(self, key: str, upload: str) -> int:
        lister = self._client.get_paginator("list_parts")
        pages = iter(lister.paginate(Bucket=self._bucket, Key=key, UploadId=upload))
        nbytes = 0
        while True:
            with self._begun_in_time(), translated("list_parts", key):
                try:
                    page = next(pages, None)
                except ClientError as exc:
                    if error_code(exc)[0] == 404:  # completed or aborted meanwhile
                        return nbytes
                    raise
            if page is None:
                return nbytes
            nbytes += sum(int(part["Size"]) for part in page.get("Parts", ()))


_PARTIAL = 206


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
        assert multipart_bytes > 0
        assert range_bytes > 0
        prefix = prefix.strip("/")
        recorder = recorder or NullRecorder()
        self._client = client
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._deadline_s = deadline_s
        self._attempt_s = attempt_s(client, deadline_s)
        self._is_directory = is_directory_bucket(bucket)
        self._listing = Listing(client, bucket, self._prefix, self._begun_in_time)
        self._crew = Crew(ranges_max)
        self._wire = Wire(
            client,
            place=(bucket, self._prefix),
            hedge=Hedge(hedge_percent_max),
            is_direct=is_direct and not self._is_directory,
            recorder=recorder,
        )
        self._ranges = Ranges(client, self._wire, self._crew, range_bytes=range_bytes)
        self._writer = Writer(
            client,
            Uploads(client, self._wire, self._crew),
            exists=lambda key: self._head(key) is not None,
            multipart_bytes=multipart_bytes,
            term=self._term,
            recorder=recorder,
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
            found = self._get(key, self._term())
            return None if found is None else found[0]

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes ``[start, end)`` by one ranged request, or None."""
        if end <= start:
            return None if self.head(key) is None else b""
        with translated("get_range", key):
            return self._get_range(key, start, end, self._term())

    def _get_range(self, key: str, start: int, end: int, term: Term) -> bytes | None:
        try:
            found = self._get(key, term, end - start, Range=f"bytes={start}-{end - 1}")
        except ClientError as exc:
            if error_code(exc)[0] == 416:  # beyond the end, so there is a value
                return b""
            raise
        if found is None:
            return None
        value, status = found
        return value if status == _PARTIAL else value[start:end]

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """Read from the socket into ``buffer``; more than ``range_bytes`` by ranges on several
        connections. The length is checked before and after."""
        check_key(key)
        is_whole, first = start is None, start or 0
        if not is_whole and not len(buffer):
            value = self.get_range(key, first, first)
        else:
            place, term = self._place(key), self._term()
            wanted = Wanted(place, key, first, buffer, arrived, is_whole, term)
            with translated("get_into", key):
                with suppress(NoAnswer):
                    return self._ranges.read(wanted)
                if is_whole:
                    return self._ranges.read_by_client(wanted)
                value = self._get_range(key, first, first + len(buffer), term)
        return None if value is None else copy_into(key, value, buffer, arrived)

    def head(self, key: str) -> Entry | None:
        """Size and age of the object, or None. A missing bucket is None as well: the answer to a
        HEAD does not tell one from the other."""
        with self._begun_in_time():
            return self._head(key)

    def _head(self, key: str) -> Entry | None:
        check_key(key)
        with translated("head", key):
            try:
                answer = self._client.head_object(**self._place(key))
            except ClientError as exc:
                if is_absent(self._client, self._place(key), exc):
                    return None
                raise
            return Entry(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Entries in key order, a page of 1000 in memory; objects that are no keys are left out.

        Directory buckets have no order, and list whole folders: all of the folder is looked at."""
        check_prefix(prefix)
        listed = prefix[: prefix.rfind("/") + 1] if self._is_directory else prefix
        for page in self._listing.pages("list_objects_v2", listed):
            for found in page.get("Contents", ()):
                key = found["Key"].removeprefix(self._prefix)
                if is_key(key) and key.startswith(prefix):
                    yield Entry(key, found["Size"], found["LastModified"].timestamp())

    def folders(self, folder: str) -> list[str]:
        """A request per 1000 names."""
        check_prefix(f"{folder}/" if folder else "")
        return self._listing.folders(folder)

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """One conditional request; see the class for servers that have none."""
        check_key(key)
        with translated("put_if_absent", key), memoryview(value) as view:
            return self._writer.put_if_absent(self._place(key), key, view)

    def put(self, key: str, value: Buffer) -> None:
        """One request, or an upload in parts."""
        check_key(key)
        with translated("put", key), memoryview(value) as view:
            self._writer.put(self._place(key), key, view)

    def delete(self, key: str) -> bool:
        """Remove the object. S3 does not tell whether there was one: always True."""
        check_key(key)
        with self._begun_in_time(), translated("delete", key):
            self._client.delete_object(**self._place(key))
        return True

    def unfinished(self) -> Iterator[Unfinished]:
        """Uploads in parts that nobody has completed."""
        return self._listing.unfinished()

    def discard(self, unfinished: Unfinished) -> bool:
        """Abort the upload."""
        return self._listing.abort(unfinished)

    def check(self) -> None:
        """List one object: the answer to a listing names what is wrong, that to a HEAD does not."""
        where = f"s3://{self._bucket} at {self._endpoint}"
        with self._begun_in_time(), translated("check", where):
            self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)

    def close(self) -> None:
        """End the threads; close the client and its connections."""
        self._crew.close()
        self._wire.close()
        self._client.close()

    def _place(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _term(self) -> Term:
        return open_term(self._deadline_s, self._attempt_s)

    def _begun_in_time(self) -> AbstractContextManager[None]:
        return self._term().client()

    def _get(
        self, key: str, term: Term, nbytes_max: int = VALUE_BYTES_MAX, **options: Any
    ) -> tuple[bytes, int] | None:
        """The body of an answer and its status; ``nbytes_max``: of a part."""
        check_key(key)
        with term.client():
            try:
                answer: Any = self._client.get_object(**self._place(key), **options)
            except ClientError as exc:
                if is_absent(self._client, self._place(key), exc):
                    return None
                raise
            status = answer["ResponseMetadata"]["HTTPStatusCode"]
            limit = nbytes_max if status == _PARTIAL else VALUE_BYTES_MAX
            return read_all(answer, term.end_s, limit), status
