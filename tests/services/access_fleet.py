"""Operators' commands against real servers, with the rights of a role in both stores."""

import secrets
from typing import Any

from typer.testing import CliRunner

from objkv.assembly.backends import Backends, open_backends
from objkv.cli.app import app
from objkv.config import Config, Role
from objkv.ops.doctor.access import ROLES, access_of
from objkv.telemetry import NullRecorder
from tests.support.servers.ceph import CephUsers, S3Server
from tests.support.servers.fixtures import BUCKET, s3_config
from tests.support.servers.redis import RedisServer

PASSWORD = "hunter2"


class Fleet:
    """Both stores, and a user of both for each role."""

    def __init__(self, s3: S3Server, redis: RedisServer) -> None:
        self._s3 = s3
        place = {"bulk_url": f"s3://{BUCKET}/commands", "index_url": redis.url}
        users, admin = CephUsers(s3), redis.client()
        self.settings: dict[Role, dict[str, str]] = {}
        for role in ROLES:
            found = access_of(self.config(**place), role, tenant="a")
            assert found.iam is not None
            assert found.acl is not None
            # Unique, because all modules of a test process share one radosgw.
            name = f"commands-{role}-{secrets.token_hex(4)}"
            access_key, secret_key = users.add(name, found.iam)
            words = found.acl.replace(">PASSWORD", f">{PASSWORD}").split()
            admin.execute_command("ACL", "SETUSER", *words[1:])
            self.settings[role] = {
                **found.settings,
                "index_url": redis.url,
                "redis_password": PASSWORD,
                "s3_access_key_id": access_key,
                "s3_secret_access_key": secret_key,
            }

    def config(self, **changes: Any) -> Config:
        return s3_config(self._s3, lookup_deadline_ms=20_000, **changes)

    def everything(self) -> Backends:
        """The tenant's stores, with all rights."""
        mine = self.settings["writer"]
        names = ("bulk_url", "index_url", "redis_prefix")
        return open_backends(self.config(**{name: mine[name] for name in names}), NullRecorder())

    def opened(self, role: Role) -> Backends:
        """The tenant's stores, with the rights of ``role``."""
        return open_backends(self.config(**self.settings[role]), NullRecorder())

    def environment(self, role: Role) -> dict[str, str]:
        config = self.config(**self.settings[role])
        names = ("s3_endpoint_url", "s3_addressing", "load_deadline_ms", "lookup_deadline_ms")
        given = {name: str(getattr(config, name)) for name in names} | self.settings[role]
        return {f"OBJKV_{name.upper()}": value for name, value in given.items()}


def run(fleet: Fleet, role: Role, *words: str, code: int = 0, **settings: str) -> str:
    more = {f"OBJKV_{name.upper()}": value for name, value in settings.items()}
    ran = CliRunner().invoke(app, words, env=fleet.environment(role) | more)
    assert ran.exit_code == code, (words, ran.output, ran.stderr)
    for secret in (PASSWORD, fleet.settings[role]["s3_secret_access_key"]):
        assert secret not in ran.output
    return ran.output
