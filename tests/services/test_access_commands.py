"""Operators' commands with a sweeper's rights in both stores, and the doctor with each role's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from objkv.assembly.backends import Backends, open_backends
from objkv.cli.app import app
from objkv.config import Config, Role
from objkv.ops.access import ROLES, access_of
from objkv.telemetry import NullRecorder
from objkv.testing.servers.ceph import S3Server
from objkv.testing.servers.ceph_users import CephUsers
from objkv.testing.servers.redis import RedisServer, valkey_server
from tests.ops.world import NAMESPACE, save, save_identity
from tests.services.s3_fixtures import BUCKET, s3_config

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]


PASSWORD = "hunter2"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


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
            access_key, secret_key = users.add(f"commands-{role}", found.iam)
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
        """The tenant's stores, for whoever may do everything."""
        mine = self.settings["writer"]
        names = ("bulk_url", "index_url", "redis_prefix")
        return open_backends(self.config(**{name: mine[name] for name in names}), NullRecorder())

    def environment(self, role: Role) -> dict[str, str]:
        config = self.config(**self.settings[role])
        names = ("s3_endpoint_url", "s3_addressing", "load_deadline_ms", "lookup_deadline_ms")
        given = {name: str(getattr(config, name)) for name in names} | self.settings[role]
        return {f"OBJKV_{name.upper()}": value for name, value in given.items()}


@pytest.fixture(scope="module")
def fleet(s3_server: S3Server, redis: RedisServer) -> Fleet:
    return Fleet(s3_server, redis)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def run(fleet: Fleet, role: Role, *words: str, code: int = 0) -> str:
    ran = CliRunner().invoke(app, words, env=fleet.environment(role))
    assert ran.exit_code == code, (words, ran.output, ran.stderr)
    for secret in (PASSWORD, fleet.settings[role]["s3_secret_access_key"]):
        assert secret not in ran.output
    return ran.output


@pytest.mark.parametrize("role", ROLES)
def test_the_doctor_finds_every_role_well(fleet: Fleet, home: None, role: Role) -> None:
    out = run(fleet, role, "doctor")
    assert "denied" not in out
    assert "everything works" in out


def test_operators_do_all_that_they_do_with_a_sweepers_rights(fleet: Fleet, home: None) -> None:
    with fleet.everything() as ends:
        save_identity(ends.bulk)
        keys = save(ends.bulk, ends.index)
        first, second, last = (key.prefix_hash for key in keys)
        assert NAMESPACE[:8] in run(fleet, "sweeper", "ls")
        run(fleet, "sweeper", "pin", last.hex())
        assert last.hex()[:12] in run(fleet, "sweeper", "pin", "--list")
        run(fleet, "sweeper", "unpin", last.hex())
        ends.bulk.put(keys[2].path(), b"not a payload")
        run(fleet, "sweeper", "verify", "--all", "--quarantine", "--force", code=1)
        assert ends.bulk.get(keys[2].path()) is None
        # On this server a value is its writer's, whoever's the bucket is.
        assert f"quarantine/{keys[2].path()}" in [entry.key for entry in ends.bulk.scan("")]
        assert ends.index.lookup(NAMESPACE, [last]) == [None]
        ends.index.drop(NAMESPACE, first)
        run(fleet, "sweeper", "rebuild")
        assert ends.index.lookup(NAMESPACE, [first]) != [None]
        ends.index.drop(NAMESPACE, second)
        run(fleet, "sweeper", "sweep", "--apply", "--grace-s", "0", "--force")
        assert ends.bulk.get(keys[1].path()) is None
        assert ends.bulk.get(keys[0].path()) is not None


@pytest.mark.parametrize("words", [("pin", "00" * 20), ("rebuild",), ("sweep", "--apply")])
def test_what_a_role_may_not_do_is_a_sentence(
    fleet: Fleet, home: None, words: tuple[str, ...]
) -> None:
    with fleet.everything() as ends:
        save_identity(ends.bulk)
        save(ends.bulk, ends.index)
    ran = CliRunner().invoke(app, words, env=fleet.environment("reader"))
    assert ran.exit_code in (1, 2)
    assert "Traceback" not in ran.output
