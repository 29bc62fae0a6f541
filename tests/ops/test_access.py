"""The rights of each role, as text: they never allow too much, whatever the settings.

``tests/services`` shows that they suffice on real servers.
"""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from objkv.config import Config, load_config
from objkv.errors import ConfigError
from objkv.ops.doctor.access import ROLES, Access, access_of, acl_rights, iam_policy, kms_statement

TENANTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}", fullmatch=True)
PLACE = {"bulk_url": "s3://bucket/objkv", "index_url": "rediss://h"}


def access(role: str, tenant: str | None = None, **changes: Any) -> Access:
    return access_of(load_config(PLACE | changes, environ={}), role, tenant=tenant)  # type: ignore[arg-type]


def actions(found: Access) -> set[str]:
    assert found.iam is not None
    return {action for one in found.iam["Statement"] for action in one["Action"]}


def allows(policy: dict[str, Any], action: str, key: str) -> bool:
    """Whether ``policy`` allows ``action`` on an object, or a listing with it as the prefix."""
    for one in policy["Statement"]:
        if action not in one["Action"]:
            continue
        if action == "s3:ListBucket":
            prefixes = one.get("Condition", {}).get("StringLike", {}).get("s3:prefix", ["*"])
            if any(_like(key, pattern) for pattern in prefixes):
                return True
        elif any(_like(f"arn:aws:s3:::bucket/{key}", pattern) for pattern in one["Resource"]):
            return True
    return False


def _like(value: str, pattern: str) -> bool:
    parts = [".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern)]
    return re.fullmatch("".join(parts), value, re.DOTALL) is not None


def test_only_who_sweeps_deletes_and_only_who_saves_puts_payloads() -> None:
    assert actions(access("reader")) == {"s3:ListBucket", "s3:GetObject"}
    assert actions(access("writer")) == actions(access("reader")) | {"s3:PutObject"}
    sweeps = {"s3:DeleteObject", "s3:PutObject", "s3:GetLifecycleConfiguration"}
    assert actions(access("sweeper")) == actions(access("reader")) | sweeps
    policy = access("sweeper").iam
    assert policy is not None
    payload = f"{'0' * 32}/ab/{'ab' * 20}.0.L0-1_H0-1.safetensors"
    assert not allows(policy, "s3:PutObject", f"objkv/{payload}")
    assert allows(policy, "s3:PutObject", f"objkv/{'0' * 32}/pins/{'ab' * 20}.json")
    assert allows(policy, "s3:PutObject", f"objkv/quarantine/{payload}")
    assert allows(policy, "s3:DeleteObject", f"objkv/{payload}")


@pytest.mark.parametrize("role", ROLES)
def test_nothing_is_allowed_wholesale(role: str) -> None:
    found = access(role)
    assert not [action for action in actions(found) if "*" in action]
    assert found.acl is not None
    assert " -@all " in found.acl
    assert "+@" not in found.acl
    assert "~* " not in found.acl
    assert "allkeys" not in found.acl
    assert found.acl.split()[2:5] == ["reset", "on", ">PASSWORD"], "what a user had is taken away"
    condition = kms_statement(role, "arn:aws:kms:eu-west-1:1:key/x")["Condition"]
    assert condition == {"StringLike": {"kms:ViaService": ["s3.*.amazonaws.com"]}}


@given(st.sampled_from(ROLES), TENANTS, TENANTS, st.text(max_size=8))
@example("reader", "a", "ab", "x")
def test_no_tenant_reaches_into_another(role: str, mine: str, theirs: str, rest: str) -> None:
    own = access(role, mine)
    assert own.iam is not None
    assert own.acl is not None
    pattern = re.search(r" ~(\S+) ", own.acl)
    assert pattern is not None
    verbs = ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject")
    keys = [f"objkv/{theirs}/{rest}", f"objkv/{theirs}", "objkv/", "objkv", ""]
    if mine != theirs:
        assert not [key for key in keys for verb in verbs if allows(own.iam, verb, key)]
        assert not fnmatchcase(f"objkv-{theirs}:i:{rest}", pattern[1])
        assert not fnmatchcase("objkv:i:", pattern[1])
    assert allows(own.iam, "s3:GetObject", f"objkv/{mine}/{rest}")
    assert allows(own.iam, "s3:ListBucket", f"objkv/{mine}/")
    assert fnmatchcase(f"objkv-{mine}:i:", pattern[1])


@given(st.sampled_from(ROLES), TENANTS)
def test_a_tenants_settings_are_settings(role: str, tenant: str) -> None:
    """The printed settings lead to the places of the printed rights, with or without a tenant."""
    found = access(role, tenant)
    again = access_of(load_config(found.settings, environ={}), found.role)
    assert (again.iam, again.acl, again.settings) == (found.iam, found.acl, found.settings)


def test_commands_follow_the_places() -> None:
    plain = {"has_hot": False, "is_cluster": False, "has_database": False}
    commands = "+ping +client|setname +hget +hmget +hgetall"
    assert acl_rights("reader", "p", **plain) == f"~p:* -@all {commands}"
    for role in ROLES:
        with_hot = acl_rights(role, "p", **plain | {"has_hot": True}).split()
        assert set(with_hot) > set(acl_rights(role, "p", **plain).split())
        assert len(with_hot) == len(set(with_hot))
    assert access("reader", index_url="rediss://h/2").acl != access("reader").acl
    assert access("reader", hot_save_bytes_max=0).acl != access("reader").acl
    assert "+cluster|slots +command" in str(access("reader", index_url="rediss+cluster://h").acl)


@pytest.mark.parametrize(
    ("tenant", "url", "words"),
    [
        *(
            (None, f"s3://{place}", "bulk_url")
            for place in ("bucket/a*", "bucket/${aws:x}", "b@c/x")
        ),
        *((name, "s3://bucket", "tenant") for name in ("", "a/b", "a*", "a:b", "..", "x" * 49)),
        ("a", "s3://kv--use1-az4--x-s3/objkv", "use one bucket per tenant"),
    ],
)
def test_places_and_tenants_that_a_policy_would_misread_are_refused(
    tenant: str | None, url: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        access("writer", tenant, bulk_url=url)


def test_a_bucket_that_a_key_encrypts() -> None:
    found = [
        iam_policy(role, "arn", "p", kms_key_arn="arn:aws:kms:r:1:key/2")["Statement"][-1]
        for role in ROLES
    ]
    assert [one["Resource"] for one in found] == [["arn:aws:kms:r:1:key/2"]] * 3
    assert found[0]["Action"] == ["kms:Decrypt"]
    assert found[1]["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]


DOCS = Path(__file__).parents[2] / "docs" / "security.md"


def test_the_page_shows_what_the_command_prints() -> None:
    text = DOCS.read_text()
    block = re.search(r"<!-- iam writer -->\n```json\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert json.loads(block[1]) == access("writer", "a").iam
    for role in ROLES:
        assert f"\n{access(role, 'a').acl}\n" in text


DIRECTORY = {"bulk_url": "s3://kv--use1-az4--x-s3/objkv"}


def test_a_directory_bucket_grants_sessions_and_readers_get_only_those_that_read() -> None:
    writer = access("writer", **DIRECTORY).iam
    assert writer is not None
    (opens,) = writer["Statement"]
    assert opens["Action"] == ["s3express:CreateSession"]
    assert opens["Resource"] == ["arn:aws:s3express:*:*:bucket/kv--use1-az4--x-s3"]
    assert "Condition" not in opens
    reader = access("reader", **DIRECTORY, s3_region="us-east-1").iam
    assert reader is not None
    (opens,) = reader["Statement"]
    assert opens["Resource"] == ["arn:aws:s3express:us-east-1:*:bucket/kv--use1-az4--x-s3"]
    assert opens["Condition"] == {"StringEquals": {"s3express:SessionMode": "ReadOnly"}}


def test_a_put_with_an_acl_needs_a_second_right() -> None:
    config = Config(bulk_url="s3://bucket/p", s3_acl="bucket-owner-full-control")
    for role in ("writer", "sweeper"):
        iam = access_of(config, role).iam
        assert iam is not None
        actions = [one["Action"] for one in iam["Statement"]]
        assert any({"s3:PutObject", "s3:PutObjectAcl"} <= set(one) for one in actions)
    assert "Acl" not in str(access_of(config, "reader").iam)
