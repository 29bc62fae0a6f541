"""The least-privilege rights of each role: an IAM policy for the bucket and an ACL for Redis.

``objkv access``, ``docs/security.md`` and Terraform all use the rights defined here, and tests do
each role's work with exactly these rights.
"""

import re
from dataclasses import dataclass
from typing import Any, Final, get_args

from objkv.config import Config, Role, is_directory_bucket, parse_url
from objkv.errors import ConfigError

ROLES: Final[tuple[Role, ...]] = get_args(Role)
PASSWORD: Final = "PASSWORD"  # noqa: S105  # stands for one
PINS: Final = "*/pins/*"
QUARANTINE: Final = "quarantine/*"
OPERATOR: Final = "operator/*"
"""The only paths that a sweeper writes, below the prefix. ``*`` matches any characters."""

_CONNECT: Final = ("ping", "client|setname")
_DATABASE: Final = ("select",)
_CLUSTER: Final = ("cluster|slots", "command")
_INDEX: Final[dict[Role, tuple[str, ...]]] = {
    "reader": ("hget", "hmget", "hgetall"),
    "writer": (
        *("hget", "hmget", "hgetall", "eval", "evalsha", "type", "hset", "hexists", "hkeys"),
        *("hdel", "get", "set", "del", "pexpire", "pttl", "hincrby"),
    ),
}
_INDEX["sweeper"] = (*_INDEX["writer"], "scan", "info", "time")
_HOT: Final[dict[Role, tuple[str, ...]]] = {
    "reader": ("get", "exists", "getrange"),
    "writer": ("get", "exists", "getrange", "set", "strlen", "pttl"),
    "sweeper": ("get", "strlen", "pttl", "unlink"),
}
_PLAIN: Final = re.compile(r"[A-Za-z0-9!_.'()=+@:,/ -]*")
"""A prefix in a bucket without characters that a policy reads as a pattern or a variable."""
_BUCKET: Final = re.compile(r"[A-Za-z0-9._-]+")
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")

_EVERY: Final = ROLES
COMMAND_ROLES: Final[dict[str, tuple[Role, ...]]] = {
    **dict.fromkeys(
        (
            *("access", "admission", "audit", "diff", "doctor", "exporter"),
            *("ls", "ls NAMESPACE", "ls --bulk", "ls --prefixes", "ls --tree", "match"),
            *("pin --list", "rebuild", "show", "size", "sweep", "top", "verify"),
            "verify --quarantine",
        ),
        _EVERY,
    ),
    "admission never": ("writer", "sweeper"),
    "bench": ("writer",),
    "pin": ("writer", "sweeper"),
    "rebuild --apply": ("writer", "sweeper"),
    "unpin": ("sweeper",),
    "sweep --apply": ("sweeper",),
    "verify --quarantine --apply": ("sweeper",),
}
"""The roles whose rights are enough for a command. Commands for a local machine (``demo``,
``gpu-check``) need no role, and ``warm`` uses a replica's."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rights that a role needs in the configured store and index."""

    role: Role
    settings: dict[str, str]
    """Settings for a process of that role, without credentials."""
    iam: dict[str, Any] | None
    """None if the bulk store is not a bucket."""
    acl: str | None
    """One line of an ACL file, with ``PASSWORD`` for the password; None if the index is not a
    Redis. The part from ``on`` is also the access string of a managed server."""
    commands: tuple[str, ...] = ()
    """The commands of objkv that the rights are enough for."""


def access_of(
    config: Config, role: Role, *, tenant: str | None = None, kms_key_arn: str | None = None
) -> Access:
    """Return the rights of ``role`` in the backends of ``config``. With ``tenant``, they cover only
    the tenant's own folder of the bucket and its own prefix in Redis. They contain no secret of
    ``config``. Raises ``ConfigError`` if a policy cannot express the bucket or prefix."""
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"tenant {tenant!r}: use 1 to 48 letters, digits and ._-, with a letter or digit first"
        )
    settings = {"role": role, "tenant": tenant or config.tenant}
    iam = acl = None
    if config.bulk_url.startswith("s3:"):
        place = parse_url("bulk_url", config.bulk_url)
        if not _BUCKET.fullmatch(place.host):
            raise ConfigError("bulk_url: a policy cannot contain this bucket name")
        is_directory = is_directory_bucket(place.host)
        if is_directory and tenant is not None:
            raise ConfigError(
                "bulk_url: rights in a directory bucket cannot be limited to a prefix: use one "
                "bucket per tenant"
            )
        prefix = "/".join(filter(None, (place.path, tenant)))
        if not _PLAIN.fullmatch(prefix):
            raise ConfigError(
                f"bulk_url: policies read a character of the prefix {prefix!r} as a pattern"
            )
        settings["bulk_url"] = f"s3://{place.host}/{prefix}".rstrip("/")
        if is_directory:
            arn = f"arn:aws:s3express:{config.s3_region or '*'}:*:bucket/{place.host}"
            iam = directory_policy(role, arn, kms_key_arn=kms_key_arn)
        else:
            iam = iam_policy(role, f"arn:aws:s3:::{place.host}", prefix, kms_key_arn=kms_key_arn)
        if config.s3_acl is not None:  # a put with an ACL needs a second right
            for statement in iam["Statement"]:
                if "s3:PutObject" in statement["Action"]:
                    statement["Action"].append("s3:PutObjectAcl")
    if config.index_url.startswith("redis"):
        index = parse_url("index_url", config.index_url)
        settings["index_url"] = index.shown.replace("***@", "")
        settings["redis_prefix"] = "-".join(filter(None, (config.redis_prefix, tenant)))
        settings["redis_username"] = f"{settings['redis_prefix']}-{role}"
        rights = acl_rights(
            role,
            settings["redis_prefix"],
            has_hot=config.hot_save_bytes_max > 0,
            is_cluster=index.scheme.endswith("+cluster"),
            has_database=int(index.path or 0) > 0,
        )
        # For an existing user, rules are added to its rights unless "reset" comes first.
        acl = f"user {settings['redis_username']} reset on >{PASSWORD} {rights}"
    commands = tuple(name for name, roles in COMMAND_ROLES.items() if role in roles)
    return Access(role, settings, iam, acl, commands)


def iam_policy(
    role: Role, bucket_arn: str, prefix: str, *, kms_key_arn: str | None = None
) -> dict[str, Any]:
    """Return the policy of ``role`` for ``prefix`` (without outer slashes) of one bucket; an empty
    prefix means the whole bucket. ``kms_key_arn`` names the key that encrypts the bucket."""
    inside = f"{bucket_arn}/{prefix}/" if prefix else f"{bucket_arn}/"
    find: dict[str, Any] = {"Sid": "Find", "Effect": "Allow", "Action": ["s3:ListBucket"]}
    find["Resource"] = [bucket_arn]
    if prefix:
        # The slash matters: "a*" would also list "ab". A listing without a prefix does not match.
        find["Condition"] = {"StringLike": {"s3:prefix": [f"{prefix}/*"]}}
    statements = [find, _allowed("Load", ["s3:GetObject"], f"{inside}*")]
    if role == "writer":
        statements += [_allowed("Save", ["s3:PutObject"], f"{inside}*")]
    if role == "sweeper":
        statements += [
            _allowed("Judge", ["s3:GetLifecycleConfiguration"], bucket_arn),
            _allowed("Sweep", ["s3:DeleteObject"], f"{inside}*"),
            _allowed(
                "Keep",
                ["s3:PutObject"],
                *(f"{inside}{path}" for path in (PINS, QUARANTINE, OPERATOR)),
            ),
        ]
    if kms_key_arn is not None:
        statements.append(kms_statement(role, kms_key_arn))
    return {"Version": "2012-10-17", "Statement": statements}


def directory_policy(
    role: Role, bucket_arn: str, *, kms_key_arn: str | None = None
) -> dict[str, Any]:
    """Return the policy of ``role`` for one S3 Express directory bucket. Its only right is to open
    a session, which can read the whole bucket, or read and write all of it."""
    statement = _allowed("OpenSessions", ["s3express:CreateSession"], bucket_arn)
    if role == "reader":
        statement["Condition"] = {"StringEquals": {"s3express:SessionMode": "ReadOnly"}}
    statements = [statement]
    if kms_key_arn is not None:
        statements.append(kms_statement(role, kms_key_arn, service="s3express"))
    return {"Version": "2012-10-17", "Statement": statements}


def kms_statement(role: Role, key_arn: str, *, service: str = "s3") -> dict[str, Any]:
    """The rights that S3 needs on an encrypted bucket's key on behalf of ``role``."""
    actions = ["kms:Decrypt"] if role == "reader" else ["kms:Decrypt", "kms:GenerateDataKey"]
    statement = _allowed("UseTheKey", actions, key_arn)
    # Only through S3: otherwise the role could use the key elsewhere.
    statement["Condition"] = {"StringLike": {"kms:ViaService": [f"{service}.*.amazonaws.com"]}}
    return statement


def acl_rights(
    role: Role, prefix: str, *, has_hot: bool, is_cluster: bool, has_database: bool
) -> str:
    """Return the keys of ``role``, and the commands that it sends and that its scripts call, as ACL
    rules. ``has_hot``: Redis is also the hot store. ``has_database``: keys are not in database
    0."""
    groups = [_CONNECT, _INDEX[role]]
    groups += [_HOT[role]] * has_hot + [_DATABASE] * has_database + [_CLUSTER] * is_cluster
    commands = dict.fromkeys(f"+{command}" for group in groups for command in group)
    return f"~{prefix}:* -@all {' '.join(commands)}"


def _allowed(sid: str, actions: list[str], *resources: str) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": list(resources)}
