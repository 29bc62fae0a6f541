"""What a bucket lists: objects, what looks like folders, and uploads that nobody has completed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from objkv.stores.base import Unfinished, is_key
from objkv.stores.s3_client import error_code, translated

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

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
