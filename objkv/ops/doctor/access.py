"""The rights of each role, and nothing beyond them: an IAM policy for the bucket, an ACL for Redis.

The one place where they are written: what ``objkv access`` prints, what ``docs/access.md`` shows
and what Terraform attaches comes from here, and tests do each role's work with exactly these.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final, get_args
from urllib.parse import urlsplit

from objkv.config import Config, Role, is_directory_bucket
from objkv.errors import ConfigError

ROLES: Final[tuple[Role, ...]] = get_args(Role)
PASSWORD: Final = "PASSWORD"  # noqa: S105  # stands for one
PINS: Final = "*/pins/*"
QUARANTINE: Final = "quarantine/*"
"""Below the prefix: all that a sweeper writes. A ``*`` matches any characters, ``/`` included."""

_CONNECT: Final = ("ping", "client|setname")
_DATABASE: Final = ("select",)
_CLUSTER: Final = ("cluster|slots", "command")
_INDEX: Final[dict[Role, tuple[str, ...]]] = {
    "reader": ("hget", "hmget", "hgetall", "hlen"),
    "writer": (
        *(
            "hget",
            "hmget",
            "hgetall",
            "hlen",
            "eval",
            "evalsha",
            "type",
            "hset",
            "hexists",
            "hkeys",
        ),
        *("hdel", "get", "set", "del", "pexpire", "pttl", "hincrby"),
    ),
}
_INDEX["sweeper"] = (*_INDEX["writer"], "scan")
_HOT: Final[dict[Role, tuple[str, ...]]] = {
    "reader": ("get", "exists", "getrange"),
    "writer": ("get", "exists", "getrange", "set", "strlen", "pttl"),
    "sweeper": ("get", "strlen", "pttl", "unlink"),
}
_PLAIN: Final = re.compile(r"[A-Za-z0-9!_.'()=+@:,/ -]*")
"""Of a prefix in a bucket: no character that a policy would take for a pattern or a variable."""
_BUCKET: Final = re.compile(r"[A-Za-z0-9._-]+")
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


@dataclass(frozen=True, slots=True)
class Access:
    """What a role needs in the places that the settings name."""

    role: Role
    settings: dict[str, str]
    """What a process of that role is to be told, besides credentials."""
    iam: dict[str, Any] | None
    """None where the bulk store is no bucket."""
    acl: str | None
    """One line of an ACL file, with ``PASSWORD`` for the password; None where the index is no
    Redis. From ``on`` on it is also the access string of a managed server."""


def access_of(
    config: Config, role: Role, *, tenant: str | None = None, kms_key_arn: str | None = None
) -> Access:
    """The rights of ``role`` in the places of ``config``; those of ``tenant`` alone if it is named:
    below a folder of the bucket, and with a prefix in Redis, of its own.

    No secret of ``config`` is in them. Raises ``ConfigError`` for a place that no policy can name.
    """
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise ConfigError(f"tenant {tenant!r}: 1 to 48 letters, digits and ._-, no sign first")
    settings = {"role": role, "tenant": tenant or config.tenant}
    iam = acl = None
    if config.bulk_url.startswith("s3:"):
        parts = urlsplit(config.bulk_url)
        if not _BUCKET.fullmatch(parts.netloc):
            raise ConfigError("bulk_url: this cannot be the name of a bucket in a policy")
        is_directory = is_directory_bucket(parts.netloc)
        if is_directory and tenant is not None:
            raise ConfigError(
                "bulk_url: rights in a directory bucket cannot be limited to a prefix: give each "
                "tenant a bucket"
            )
        prefix = "/".join(filter(None, (parts.path.strip("/"), tenant)))
        if not _PLAIN.fullmatch(prefix):
            raise ConfigError(
                f"bulk_url: policies take some character of the prefix {prefix!r} for a pattern"
            )
        settings["bulk_url"] = f"s3://{parts.netloc}/{prefix}".rstrip("/")
        if is_directory:
            arn = f"arn:aws:s3express:{config.s3_region or '*'}:*:bucket/{parts.netloc}"
            iam = directory_policy(role, arn, kms_key_arn=kms_key_arn)
        else:
            iam = iam_policy(role, f"arn:aws:s3:::{parts.netloc}", prefix, kms_key_arn=kms_key_arn)
    if config.index_url.startswith("redis"):
        settings["redis_prefix"] = "-".join(filter(None, (config.redis_prefix, tenant)))
        settings["redis_username"] = f"{settings['redis_prefix']}-{role}"
        rights = acl_rights(
            role,
            settings["redis_prefix"],
            has_hot=config.hot_payload_bytes_max > 0,
            is_cluster="+cluster:" in config.index_url,
            has_database=_database(config.index_url) > 0,
        )
        # Told of a user that is there already, rules add to what it has, but for "reset".
        acl = f"user {settings['redis_username']} reset on >{PASSWORD} {rights}"
    return Access(role, settings, iam, acl)


def iam_policy(
    role: Role, bucket_arn: str, prefix: str, *, kms_key_arn: str | None = None
) -> dict[str, Any]:
    """The policy of ``role`` for ``prefix``, without slashes around it, of one bucket; of the whole
    bucket if it is empty. ``kms_key_arn``: of the key that encrypts the bucket."""
    inside = f"{bucket_arn}/{prefix}/" if prefix else f"{bucket_arn}/"
    find: dict[str, Any] = {"Sid": "Find", "Effect": "Allow", "Action": ["s3:ListBucket"]}
    find["Resource"] = [bucket_arn]
    if prefix:
        # With its slash: "a*" would list what "ab" has. Nor does a listing without a prefix match.
        find["Condition"] = {"StringLike": {"s3:prefix": [f"{prefix}/*"]}}
    statements = [find, _allowed("Load", ["s3:GetObject"], f"{inside}*")]
    if role == "writer":
        statements += [_allowed("Save", ["s3:PutObject", "s3:AbortMultipartUpload"], f"{inside}*")]
    if role == "sweeper":
        statements += [
            _allowed("Sweep", ["s3:DeleteObject"], f"{inside}*"),
            _allowed("Keep", ["s3:PutObject"], f"{inside}{PINS}", f"{inside}{QUARANTINE}"),
        ]
    if kms_key_arn is not None:
        statements.append(kms_statement(role, kms_key_arn))
    return {"Version": "2012-10-17", "Statement": statements}


def directory_policy(
    role: Role, bucket_arn: str, *, kms_key_arn: str | None = None
) -> dict[str, Any]:
    """The policy of ``role`` for one directory bucket of S3 Express, which knows the right to open
    a session and nothing finer: a session reads all of the bucket, or does everything in it."""
    statement = _allowed("OpenSessions", ["s3express:CreateSession"], bucket_arn)
    if role == "reader":
        statement["Condition"] = {"StringEquals": {"s3express:SessionMode": "ReadOnly"}}
    statements = [statement]
    if kms_key_arn is not None:
        statements.append(kms_statement(role, kms_key_arn, service="s3express"))
    return {"Version": "2012-10-17", "Statement": statements}


def kms_statement(role: Role, key_arn: str, *, service: str = "s3") -> dict[str, Any]:
    """What S3 asks of the key of an encrypted bucket on behalf of ``role``."""
    actions = ["kms:Decrypt"] if role == "reader" else ["kms:Decrypt", "kms:GenerateDataKey"]
    statement = _allowed("UseTheKey", actions, key_arn)
    # Through S3 alone: else whoever may read the objects' keys could use the key elsewhere.
    statement["Condition"] = {"StringLike": {"kms:ViaService": [f"{service}.*.amazonaws.com"]}}
    return statement


def acl_commands(role: Role, *, has_hot: bool, is_cluster: bool, has_database: bool) -> list[str]:
    """The commands that ``role`` sends, and those that its scripts call.

    Args:
        has_hot: whether payloads are kept in Redis.
        is_cluster: whether it is a Redis Cluster.
        has_database: whether keys are in a database other than 0.
    """
    groups = [_CONNECT, _INDEX[role]]
    groups += [_HOT[role]] * has_hot + [_DATABASE] * has_database + [_CLUSTER] * is_cluster
    return list(dict.fromkeys(command for group in groups for command in group))


def acl_rights(role: Role, prefix: str, **where: bool) -> str:
    """The keys and commands of ``role`` as ACL rules; ``where`` as in ``acl_commands``."""
    commands = " ".join(f"+{command}" for command in acl_commands(role, **where))
    return f"~{prefix}:* -@all {commands}"


def as_text(policy: dict[str, Any]) -> str:
    """``policy`` as JSON to be pasted."""
    return json.dumps(policy, indent=2)


def _allowed(sid: str, actions: list[str], *resources: str) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": list(resources)}


def _database(url: str) -> int:
    name = urlsplit(url).path.strip("/")
    return int(name) if name.isdecimal() else 0
