"""``objkv access``: the IAM policy and Redis ACL of a role."""

import json
from typing import Annotated

import typer

from objkv.cli.command import FINE, Session, command
from objkv.cli.output import Printer
from objkv.config import ENV_PREFIX, Role
from objkv.ops.doctor.access import PASSWORD, Access, access_of


@command
def access(
    session: Session,
    role: Annotated[
        Role, typer.Option(help="Role that gets the rights. Replicas are readers or writers.")
    ],
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Limit the rights to this tenant's prefix in the bucket and in Redis.",
            metavar="NAME",
        ),
    ] = None,
    kms_key_arn: Annotated[
        str | None, typer.Option(help="KMS key that encrypts the bucket.", metavar="ARN")
    ] = None,
) -> int:
    """Print the least-privilege IAM policy and Redis ACL for a role."""
    found = access_of(session.config, role, tenant=tenant, kms_key_arn=kms_key_arn)
    if not session.out.document(found):
        _print(session.out, found)
    return FINE


def _print(out: Printer, found: Access) -> None:
    out.line(f"# Environment of a {found.role}, without its credentials")
    for name, value in found.settings.items():
        out.line(f"{ENV_PREFIX}{name.upper()}={value}")
    out.line()
    if found.iam is None:
        out.line("# No IAM policy: the bulk store is not an S3 bucket")
    else:
        out.line("# IAM policy")
        for line in json.dumps(found.iam, indent=2).splitlines():
            out.line(line)
    out.line()
    if found.acl is None:
        out.line("# No Redis ACL: the index is not Redis")
    else:
        out.line(f"# Redis ACL. Replace {PASSWORD} with the password.")
        out.line(found.acl)
    out.line()
    commands = ", ".join(sorted(found.commands))
    out.line(f"# Commands on stored data that a {found.role} can run: {commands}")
