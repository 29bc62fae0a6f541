"""``objkv access``: the rights that a role needs, to be pasted."""

from typing import Annotated

import typer

from objkv.cli.command import FINE, Session, command
from objkv.cli.output import Printer
from objkv.config import ENV_PREFIX, Role
from objkv.ops.doctor.access import PASSWORD, Access, access_of, as_text


@command
def access(
    session: Session,
    role: Annotated[Role, typer.Option(help="Whose rights: replicas read or write.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="Those of one tenant, in a place of its own.", metavar="NAME"),
    ] = None,
    kms_key_arn: Annotated[
        str | None, typer.Option(help="Key that encrypts the bucket.", metavar="ARN")
    ] = None,
) -> int:
    """Print the least rights of a role, in the bucket and in Redis."""
    found = access_of(session.config, role, tenant=tenant, kms_key_arn=kms_key_arn)
    if session.out.machine:
        session.out.document(found)
    else:
        _print(session.out, found)
    return FINE


def _print(out: Printer, found: Access) -> None:
    out.line(f"# Environment of a {found.role}, besides its credentials")
    for name, value in found.settings.items():
        out.line(f"{ENV_PREFIX}{name.upper()}={value}")
    out.line()
    if found.iam is None:
        out.line("# The bulk store is no bucket: it has no policy")
    else:
        out.line("# IAM policy")
        for line in as_text(found.iam).splitlines():
            out.line(line)
    out.line()
    if found.acl is None:
        out.line("# The index is no Redis: it has no ACL")
    else:
        out.line(f"# Redis ACL; put a password in the place of {PASSWORD}")
        out.line(found.acl)
