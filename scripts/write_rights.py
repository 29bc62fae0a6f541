"""Terraform's ``rights.json`` and the commands of each role in ``docs/security.md``, from
``objkv.ops.doctor.access``."""

import json
from pathlib import Path
from typing import Any

from objkv.ops.doctor.access import (
    COMMAND_ROLES,
    ROLES,
    acl_rights,
    directory_policy,
    iam_policy,
    kms_statement,
)

FILE = Path(__file__).parents[1] / "terraform" / "modules" / "rights" / "rights.json"
PAGE = Path(__file__).parents[1] / "docs" / "security.md"


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


def blocks() -> dict[str, str]:
    """The table of commands and roles."""
    rows = [f"| command | {' | '.join(ROLES)} |", "|---|" + "---|" * len(ROLES)]
    for name, roles in sorted(COMMAND_ROLES.items()):
        if roles == ROLES:
            continue
        cells = ("yes" if role in roles else "no" for role in ROLES)
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return {"commands": "\n".join(rows)}
