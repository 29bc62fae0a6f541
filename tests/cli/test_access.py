"""``objkv access`` as users run it."""

import json

import pytest

from objkv.ops.doctor.access import ROLES
from tests.cli.conftest import Run

PLACE = ("--bulk-url", "s3://bucket/objkv", "--index-url", "rediss://me:hunter2@h/1")


@pytest.mark.parametrize("role", ROLES)
def test_what_is_printed_can_be_pasted(run: Run, role: str) -> None:
    ran = run("access", "--role", role, "--tenant", "a", *PLACE)
    assert ran.code == 0
    document = run("access", "--role", role, "--tenant", "a", *PLACE, "--json").document
    start, end = ran.out.index("{"), ran.out.rindex("}") + 1
    assert json.loads(ran.out[start:end]) == document["iam"]
    assert document["acl"] in ran.out.splitlines()
    assert f"OBJKV_ROLE={role}" in ran.out.splitlines()
    assert "OBJKV_BULK_URL=s3://bucket/objkv/a" in ran.out.splitlines()
    assert "hunter2" not in ran.out


def test_a_role_must_be_named_and_known(run: Run) -> None:
    assert run("access", *PLACE).code == 2
    assert run("access", "--role", "root", *PLACE).code == 2


def test_places_without_rights_are_told_as_such(run: Run) -> None:
    ran = run("access", "--role", "reader")
    assert ran.code == 0
    assert "no bucket" in ran.out
    assert "no Redis" in ran.out


def test_a_tenant_that_no_policy_can_name_is_wrong_usage(run: Run) -> None:
    ran = run("access", "--role", "reader", "--tenant", "a*", *PLACE)
    assert ran.code == 2
    assert "tenant" in ran.err
