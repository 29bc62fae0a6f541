"""The bucket of a store: requests for its values, and what AWS's client finds out about them."""

from contextlib import suppress
from itertools import count
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from objkv.config import is_directory_bucket
from objkv.errors import StoreError
from objkv.stores.base import check_key
from objkv.stores.s3.attempts import ATTEMPTS
from objkv.stores.s3.client import S3Access
from objkv.stores.s3.errors import error_code, error_of, is_missing
from objkv.stores.s3.http import Hedge, HttpResponse
from objkv.stores.s3.signing import S3Endpoint, find_endpoint

_REDIRECTS = {301, 302, 307}
_REDIRECT_CODES = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
"""Of a bucket in another region than the signature or the endpoint."""
_REFUSALS = {"AccessDenied", "Forbidden", "403"}
"""The response to a HEAD has no S3 code."""


class Bucket:
    """A bucket under a prefix. Thread-safe. Raises the client's exceptions and ``StoreError``, each
    call within ``one_call``."""

    def __init__(self, access: S3Access, name: str, prefix: str, hedge: Hedge) -> None:
        """``prefix`` is empty or ends with a slash."""
        self.name, self.prefix = name, prefix
        self.client: Any = access.client
        self._access = access
        self._hedge = hedge
        self._endpoint: S3Endpoint | None = None

    def endpoint(self) -> S3Endpoint:
        """Return where the requests go. Sends nothing. Raises like ``find_endpoint``."""
        found = self._endpoint
        if found is None:
            found = self._endpoint = find_endpoint(self.client, self.name, self.prefix)
        return found

    def place(self, key: str) -> dict[str, Any]:
        """Return bucket and key as the client's arguments."""
        check_key(key)
        return {"Bucket": self.name, "Key": self.prefix + key}

    def ask(
        self, method: str, key: str, extra: dict[str, str], body: memoryview | None = None
    ) -> HttpResponse:
        """Send a request for a value, as often as that may help, and return the head of its
        response, which the caller closes."""
        check_key(key)

        def attempt() -> HttpResponse:
            endpoint = self.endpoint()
            head = endpoint.signed(method, key, extra)
            response = self._access.connections.ask(endpoint.url, head, body, self._hedge)
            if response.status < 300:
                return response
            with response:
                raise error_of(method, response.status, response.read())

        for turn in count(1):
            try:
                return self._access.repeater.run(attempt)
            except ClientError as exc:
                status, code = error_code(exc)
                is_redirect = status in _REDIRECTS or code in _REDIRECT_CODES
                if turn == ATTEMPTS or not (is_redirect and self._is_elsewhere()):
                    raise
        raise AssertionError

    def _is_elsewhere(self) -> bool:
        """Whether the client has learned that the bucket is in another region: it follows
        redirects, and remembers them."""
        with suppress(BotoCoreError, ClientError, StoreError):
            self.client.head_bucket(Bucket=self.name)
        before, self._endpoint = self._endpoint, None
        return self.endpoint() != before

    def head(self, key: str) -> Any | None:
        """Return the client's response to HEAD, or None if the key does not exist."""
        try:
            return self.client.head_object(**self.place(key))
        except ClientError as exc:
            if self.is_absent(key, exc):
                return None
            raise

    def is_absent(self, key: str, error: ClientError) -> bool:
        """Whether ``error``, the response to a request for ``key``, means that it does not exist.

        S3 returns 404 for a missing key to anyone with permission to list, and 403 to all others.
        If that permission has a condition on the prefix, some servers (Ceph 16.2) return 403,
        because a get names no prefix. A listing of this one key then decides. Directory buckets
        cannot list single keys, but their sessions may list everything, so a missing key is always
        a 404.
        """
        if is_missing(error):
            return True
        status, code = error_code(error)
        if status != 403 or code not in _REFUSALS or is_directory_bucket(self.name):
            return False
        place = self.place(key)
        try:
            page = self.client.list_objects_v2(Bucket=self.name, Prefix=place["Key"], MaxKeys=1)
        except ClientError:
            return False
        # Listings are ordered, so the key itself would be the first of all keys that start with it.
        return all(found["Key"] != place["Key"] for found in page.get("Contents", ()))
