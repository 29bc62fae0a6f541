"""Terraform's rights are those that ``objkv access`` prints, and what it prints is what objkv
understands. The modules' own tests are run by ``make terraform-check``."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from objkv.config import Config, load_config
from objkv.errors import ConfigError
from objkv.ops.doctor.access import ROLES, access_of, acl_rights, directory_policy, iam_policy
from scripts.write_rights import FILE

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "terraform"
KEY = "arn:aws:kms:eu-central-1:123456789012:key/1"
PLACE = {
    "bucket_arn": "arn:aws:s3:::kv",
    "prefix": "objkv/a",
    "redis_prefix": "objkv-a",
}
DIRECTORY = "arn:aws:s3express:us-east-1:123456789012:bucket/kv--use1-az4--x-s3"
needs_terraform = pytest.mark.skipif(
    shutil.which("terraform") is None and os.environ.get("CI") != "true",
    reason="terraform is not installed",
)


def terraform(folder: Path, *arguments: str) -> str:
    command = ["terraform", *arguments]
    # Nothing of the user's own, and no question whether there is something newer.
    environment = os.environ | {"TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1"}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def applied_rights(folder: Path, **variables: Any) -> dict[str, Any]:
    """What the module of the rights says; it needs no provider."""
    shutil.copytree(FILE.parent, folder)
    (folder / "place.auto.tfvars.json").write_text(json.dumps(PLACE | variables))
    terraform(folder, "init", "-backend=false", "-input=false")
    terraform(folder, "apply", "-auto-approve", "-input=false")
    found = json.loads(terraform(folder, "output", "-json"))
    return {name: one["value"] for name, one in found.items()}


@needs_terraform
@pytest.mark.parametrize("key", [None, KEY])
def test_what_terraform_attaches_is_what_the_command_prints(
    tmp_path: Path, key: str | None
) -> None:
    found = applied_rights(tmp_path / "rights", **({} if key is None else {"kms_key_arn": key}))
    for role in ROLES:
        printed = iam_policy(role, PLACE["bucket_arn"], PLACE["prefix"], kms_key_arn=key)
        assert json.loads(found["policies"][role]) == printed
        for kind, is_cluster in (("single", False), ("cluster", True)):
            where = {"has_hot": True, "is_cluster": is_cluster, "has_database": False}
            rights = acl_rights(role, PLACE["redis_prefix"], **where)
            assert found["access_strings"][role][kind] == f"on {rights}"


@needs_terraform
def test_a_directory_bucket_is_granted_as_the_command_prints(tmp_path: Path) -> None:
    found = applied_rights(
        tmp_path / "rights", is_directory=True, bucket_arn=DIRECTORY, kms_key_arn=KEY
    )
    for role in ROLES:
        printed = directory_policy(role, DIRECTORY, kms_key_arn=KEY)
        assert json.loads(found["policies"][role]) == printed


def asserted_environments() -> dict[str, dict[str, str]]:
    """The outputs ``environments`` that ``terraform test`` found, name by name, to be so."""
    tests = (FOLDER / "aws" / "tests" / "module.tftest.hcl").read_text()
    found = re.findall(r'output\.environments\["([a-z-]+)"\] == \{\n(.*?)\n    \}', tests, re.S)
    return {key: dict(re.findall(r'(\w+) += "([^"]*)"', body)) for key, body in found}


def test_what_terraform_prints_is_settings_of_objkv() -> None:
    environments = asserted_environments()
    assert set(environments) == {"writer", "a-writer"}
    for environment in environments.values():
        config = load_config(environ=environment | {"OBJKV_REDIS_PASSWORD": "secret-0123456789"})
        for name, value in environment.items():
            assert str(getattr(config, name.removeprefix("OBJKV_").lower())) == value
    with pytest.raises(ConfigError):  # so that a name that means nothing would be seen above
        load_config(environ={"OBJKV_S3_REGOIN": "x"})


def test_terraform_and_the_command_name_the_same_places_and_users() -> None:
    environment = asserted_environments()["a-writer"]
    shared: dict[str, Any] = {
        "bulk_url": "s3://kv-test/objkv",
        "index_url": environment["OBJKV_INDEX_URL"],
    }
    told = access_of(load_config(shared, environ={}), "writer", tenant="a").settings
    assert (
        told.items()
        <= {
            name.removeprefix("OBJKV_").lower(): value for name, value in environment.items()
        }.items()
    )


def test_terraforms_default_life_is_that_of_the_settings() -> None:
    variables = (FOLDER / "aws" / "variables.tf").read_text()
    (found,) = re.findall(r'variable "ttl_s" \{.*?default += (\d+)', variables, re.S)
    assert int(found) == Config.model_fields["ttl_s"].default
