"""If a server hides that a key is missing, only a permitted listing without the key proves it."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from objkv.stores.s3.absent import PROOF_S, Absence

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
        self.heads: list[dict[str, Any]] = []
        self.is_closed = False
        self.failure: ClientError | None = None

    def head_object(self, **place: Any) -> dict[str, Any]:
        self.heads.append(place)
        if self.failure is not None:
            raise self.failure
        if self.is_closed:
            raise answered(403, "403")
        return {}

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
    assert Absence(client).is_absent(PLACE, answered(status, code)) is absent
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
    assert Absence(client).is_absent(PLACE, answered(status, code)) is absent  # type: ignore[arg-type]
    assert client.asked == []


def test_a_refused_listing_is_not_repeated_for_each_miss() -> None:
    client: Any = Lists(denied=True)
    absence = Absence(client)
    for _ in range(3):
        assert absence.is_absent(PLACE, answered(403, "AccessDenied")) is False
    assert len(client.asked) == 1


def test_a_proof_that_another_thread_forgets_is_no_exception() -> None:
    client: Any = Lists(denied=True)
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        if calls > 2:  # between a look at the proof and its use
            absence._read = None
        return 0.0

    absence = Absence(client, clock=clock)
    absence.note_read({"Bucket": "b", "Key": "p/seen"})
    assert absence.is_absent(PLACE, answered(403, "AccessDenied"))
    assert calls > 2


def test_a_repetition_that_fails_for_a_moment_forgets_no_proof() -> None:
    client: Any = Lists(denied=True)
    now_s, seen = [0.0], {"Bucket": "b", "Key": "p/seen"}
    absence = Absence(client, clock=lambda: now_s[0])
    absence.note_read(seen)
    now_s[0] += PROOF_S + 1
    client.failure = answered(503, "SlowDown")
    assert not absence.is_absent(PLACE, answered(403, "AccessDenied"))
    client.failure = None
    assert absence.is_absent(PLACE, answered(403, "AccessDenied"))


def test_a_read_proves_misses_until_it_is_old_and_fails_when_repeated() -> None:
    client: Any = Lists(denied=True)
    now_s, seen = [0.0], {"Bucket": "b", "Key": "p/seen"}
    absence = Absence(client, clock=lambda: now_s[0])
    refused = answered(403, "AccessDenied")
    absence.note_read(seen)
    assert absence.is_absent(PLACE, refused)
    payload = PLACE | {"Key": "p/k.safetensors"}
    assert not absence.is_absent(payload, refused)
    now_s[0] += PROOF_S + 1
    assert absence.is_absent(PLACE, refused)
    assert client.heads == [seen]
    now_s[0] += PROOF_S + 1
    client.is_closed = True
    assert not absence.is_absent(PLACE, refused)
    assert not absence.is_absent(PLACE, refused)
    assert len(client.heads) == 2
