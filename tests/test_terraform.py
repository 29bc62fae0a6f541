"""The Terraform module is formatted, and its rights are those that ``objkv access`` prints.

``terraform test`` in ``terraform/aws`` needs a provider; the module of the rights needs none, and
is applied here.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from objkv.ops.access import ROLES, acl_rights, iam_policy
from scripts.write_rights import FILE, text

FOLDER = Path(__file__).parents[1] / "terraform"
KEY = "arn:aws:kms:eu-central-1:123456789012:key/1"
PLACE = {
    "bucket_arn": "arn:aws:s3:::kv",
    "prefix": "objkv/a",
    "redis_prefix": "objkv-a",
}
needs_terraform = pytest.mark.skipif(
    shutil.which("terraform") is None, reason="terraform is not installed"
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


@needs_terraform
def test_terraform_files_are_formatted() -> None:
    terraform(FOLDER, "fmt", "-check", "-recursive")


def test_the_rights_are_written_from_where_they_are_decided() -> None:
    """python scripts/write_rights.py mends this."""
    assert FILE.read_text() == text()


@needs_terraform
@pytest.mark.parametrize("key", [None, KEY])
def test_what_terraform_attaches_is_what_the_command_prints(
    tmp_path: Path, key: str | None
) -> None:
    folder = tmp_path / "rights"
    shutil.copytree(FOLDER / "aws" / "rights", folder)
    variables = PLACE | ({} if key is None else {"kms_key_arn": key})
    (folder / "place.auto.tfvars.json").write_text(json.dumps(variables))
    terraform(folder, "init", "-backend=false", "-input=false")
    terraform(folder, "apply", "-auto-approve", "-input=false")
    found: dict[str, Any] = json.loads(terraform(folder, "output", "-json"))
    for role in ROLES:
        printed = iam_policy(role, PLACE["bucket_arn"], PLACE["prefix"], kms_key_arn=key)
        assert json.loads(found["policies"]["value"][role]) == printed
        for kind, is_cluster in (("single", False), ("cluster", True)):
            where = {"has_hot": True, "is_cluster": is_cluster, "has_database": False}
            rights = acl_rights(role, PLACE["redis_prefix"], **where)
            assert found["access_strings"]["value"][role][kind] == f"on {rights}"
