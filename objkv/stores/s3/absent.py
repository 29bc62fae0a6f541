"""Whether a refusal (403) means that a key does not exist.

S3 returns 404 for a missing key to anyone with permission to list, and 403 to all others. See
``docs/decisions/0031``.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from objkv.config import is_directory_bucket
from objkv.errors import StoreError
from objkv.stores.s3.client import error_code, is_missing

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LIST_AGAIN_S = 15.0
"""How long a refused listing is not repeated: short, so that misses are misses again soon after
revoked rights return."""
_PAYLOAD = ".safetensors"
PROOF_S = 300.0
"""How long a successful read proves that this process may read."""


class Absence:
    """Interprets the refusals of one store, whose keys are all under one prefix. Thread-safe.

    If the permission to list has a condition on the prefix, some servers (Ceph 16.2) return 403,
    because a get names no prefix. Servers that honour the condition allow a listing of this one
    key, which decides at the cost of one more request. Directory buckets cannot list single keys,
    but their sessions may list everything, so a missing key is always a 404.

    A role that may not list at all gets 403 for each miss. It is a miss while a read of another key
    of the store is at most ``PROOF_S`` old; then that key is read again. Without such a proof the
    403 stays a refusal: it may just as well mean that the role may not read. So does the 403 of a
    payload.
    """

    def __init__(self, client: "S3Client", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client: Any = client
        self._clock = clock
        self._list_again_s = 0.0
        self._read: tuple[dict[str, Any], float] | None = None
        """The place that was read last, and when."""

    def note_read(self, place: dict[str, Any]) -> None:
        """Remember that ``place``, bucket and key, was just read."""
        self._read = place, self._clock()

    def is_absent(self, place: dict[str, Any], error: ClientError) -> bool:
        """Whether ``error``, the response to a request for ``place``, means that the key does not
        exist. Raises the client's exceptions other than ``ClientError``.

        Only a listing proves that a payload is missing, never a read of another key: readers forget
        the record of a missing payload, and after rights are revoked a fleet would forget all that
        it has stored.
        """
        if is_missing(error):
            return True
        status, code = error_code(error)
        if status != 403 or code not in ("AccessDenied", "403", "Forbidden"):
            return False  # the response to a HEAD has no S3 code
        is_payload = place["Key"].endswith(_PAYLOAD)
        if is_directory_bucket(place["Bucket"]):
            return False
        if self._clock() < self._list_again_s:
            return not is_payload and (self._is_proven() or self._reads_again())
        try:
            page = self._client.list_objects_v2(
                Bucket=place["Bucket"], Prefix=place["Key"], MaxKeys=1
            )
        except ClientError as exc:
            if error_code(exc)[0] != 403:
                return False
            proven = not is_payload and (self._is_proven() or self._reads_again())
            self._list_again_s = self._clock() + (PROOF_S if proven else LIST_AGAIN_S)
            return proven
        # Listings are ordered, so the key itself would be the first of all keys that start with it.
        return all(found["Key"] != place["Key"] for found in page.get("Contents", ()))

    def head(self, place: dict[str, Any]) -> Any | None:
        """Return the client's response to HEAD of ``place``, or None if the key does not exist.
        Raises the client's exceptions."""
        try:
            found = self._client.head_object(**place)
        except ClientError as exc:
            if self.is_absent(place, exc):
                return None
            raise
        self.note_read(place)
        return found

    def _is_proven(self) -> bool:
        read = self._read  # once: another thread may forget it
        return read is not None and self._clock() - read[1] <= PROOF_S

    def _reads_again(self) -> bool:
        """Whether the last key that was read can still be read. Forgets it if not: it may have been
        deleted since, and then only the next read is a proof."""
        read = self._read
        if read is None:
            return False
        place = read[0]
        try:
            self._client.head_object(**place)
        except ClientError as exc:
            if error_code(exc)[0] in (403, 404):
                self._read = None
            return False
        except (BotoCoreError, StoreError):
            return False
        self.note_read(place)
        return True
