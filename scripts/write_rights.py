"""Writes ``rights.json`` of Terraform from ``objkv.ops.doctor.access``, so that it cannot drift.

python scripts/write_rights.py; ``tests/test_terraform.py`` fails when the file is stale.
"""

import json
from pathlib import Path
from typing import Any

from objkv.ops.doctor.access import ROLES, acl_rights, directory_policy, iam_policy, kms_statement

FILE = Path(__file__).parents[1] / "terraform" / "modules" / "rights" / "rights.json"


def rights() -> dict[str, Any]:
    """The rights of all roles, with Terraform's variables in the place of places."""

    def access_string(role: Any, *, is_cluster: bool) -> str:
        where = {"has_hot": True, "is_cluster": is_cluster, "has_database": False}
        return f"on {acl_rights(role, '${redis_prefix}', **where)}"

    return {
        "policies": {role: iam_policy(role, "${bucket_arn}", "${prefix}") for role in ROLES},
        "kms": {role: kms_statement(role, "${kms_key_arn}") for role in ROLES},
        "directory": {
            "policies": {role: directory_policy(role, "${bucket_arn}") for role in ROLES},
            "kms": {
                role: kms_statement(role, "${kms_key_arn}", service="s3express") for role in ROLES
            },
        },
        "access_strings": {
            role: {
                "single": access_string(role, is_cluster=False),
                "cluster": access_string(role, is_cluster=True),
            }
            for role in ROLES
        },
    }


def text() -> str:
    """The file as it should be."""
    return json.dumps(rights(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
