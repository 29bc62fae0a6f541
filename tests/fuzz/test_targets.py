"""Every target for a moment, with the same examples every time."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz.agents import close_agents
from tests.fuzz.settings import SECRET, read_options, read_settings
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from tests.fuzz.wires import ANSWERS, FIELDS, check_find

EXAMPLES = 60
MORE = {"agent: messages": 600, "frame": 300, "key": 600, "payload header, both readers": 300}
"""Of what no other test tries at random."""


@pytest.fixture(scope="module", autouse=True)
def agents_end() -> Iterator[None]:
    yield
    close_agents()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_promises_hold_whatever_is_read(target: Target) -> None:
    random = Random(1)
    ends = {target.check(target.make(random)) for _ in range(MORE.get(target.name, EXAMPLES))}
    assert len(ends) > 1, f"only {ends}: the examples do not reach what is to be tested"


@pytest.mark.parametrize("fields", [FIELDS[:1], FIELDS], ids=["one field", "two fields"])
@pytest.mark.parametrize("answer", [*ANSWERS, b"*1\r\n" * 5000], ids=lambda answer: answer[:8])
def test_no_answer_of_redis_is_an_error_of_another_kind(
    answer: bytes, fields: tuple[str, ...]
) -> None:
    check_find((2, fields, [answer, answer], True))


def test_a_password_pasted_into_another_setting_is_not_shown() -> None:
    url = f"rediss://user:{SECRET}s3://bucket/prefix"
    text = f'bulk_url = "{url}"\nredis_password = "{SECRET}"'
    assert read_settings(text.encode()) == "refused"


def test_a_password_that_is_no_text_is_refused() -> None:
    assert read_options({"sentinel_password": "\ud800"}) == "refused"
