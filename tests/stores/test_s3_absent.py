"""If a server hides that a key is missing, only a permitted listing without the key proves it."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from objkv.stores.s3.client import is_absent

PLACE = {"Bucket": "b", "Key": "p/k"}


def answered(status: int, code: str) -> ClientError:
    return ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "GetObject",
    )


class Lists:
    """A client that may list ``keys``, or nothing."""

    def __init__(self, *keys: str, denied: bool = False) -> None:
        self._keys = keys
        self._denied = denied
        self.asked: list[dict[str, Any]] = []

    def list_objects_v2(self, **options: Any) -> dict[str, Any]:
        self.asked.append(options)
        if self._denied:
            raise answered(403, "AccessDenied")
        found = [{"Key": key} for key in self._keys if key.startswith(options["Prefix"])]
        return {"Contents": found[: options["MaxKeys"]]} if found else {}


DENIED = [(403, "AccessDenied"), (403, "403")]


@pytest.mark.parametrize(("status", "code"), DENIED)
@pytest.mark.parametrize(
    ("keys", "denied", "absent"),
    [
        ((), False, True),
        (("p/k2", "p/kk"), False, True),
        (("p/k", "p/k2"), False, False),
        ((), True, False),
    ],
)
def test_a_listing_decides_what_a_refusal_means(
    keys: tuple[str, ...], denied: bool, absent: bool, status: int, code: str
) -> None:
    client: Any = Lists(*keys, denied=denied)
    assert is_absent(client, PLACE, answered(status, code)) is absent
    assert client.asked[-1] == {"Bucket": "b", "Prefix": "p/k", "MaxKeys": 1}


@pytest.mark.parametrize(
    ("status", "code", "absent"),
    [
        (404, "NoSuchKey", True),
        (404, "NoSuchBucket", False),
        (403, "InvalidAccessKeyId", False),
        (403, "ExpiredToken", False),
        (500, "InternalError", False),
    ],
)
def test_other_answers_need_no_listing(status: int, code: str, absent: bool) -> None:
    client = Lists()
    assert is_absent(client, PLACE, answered(status, code)) is absent  # type: ignore[arg-type]
    assert client.asked == []


def test_a_refused_listing_is_not_repeated_for_each_miss() -> None:
    client: Any = Lists(denied=True)
    for _ in range(3):
        assert is_absent(client, PLACE, answered(403, "AccessDenied")) is False
    assert len(client.asked) == 1
