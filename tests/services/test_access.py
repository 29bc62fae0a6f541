"""The Redis rights of each role on real servers: enough for its work, no command too many, and
nothing of another tenant's."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from objkv.assembly.backends import open_backends
from objkv.assembly.redis import connect_redis
from objkv.config import Config, Role, load_config
from objkv.errors import ConfigError, StoreDenied, StoreError
from objkv.index.base import Usage
from objkv.index.redis.index import RedisIndex
from objkv.ops.doctor.access import ROLES, access_of
from objkv.telemetry import MemoryRecorder, NullRecorder
from scripts.write_rights import FILE
from tests.codec.payloads import CLAIM
from tests.contracts.index_contract import LONG_S, chunk, shard
from tests.services.access_roles import FIELD, HASH, NAMESPACE, WORK, save
from tests.support.servers.fixtures import PATIENT
from tests.support.servers.redis import RedisServer, valkey_server

pytestmark = pytest.mark.slow

PATH = CLAIM.key.path()
MODULE = FILE.parents[1] / "index" / "main.tf"


class Place:
    """A folder and a server, one or several of whose nodes share users and records."""

    def __init__(self, url: str, nodes: list[redis.Redis], folder: Path) -> None:
        self._place = {"bulk_url": f"file://{folder}", "index_url": url, **PATIENT}
        self._folder = folder
        self.nodes = nodes

    @property
    def admin(self) -> redis.Redis:
        return self.nodes[0]

    def settings(self, **changes: Any) -> Config:
        return load_config(self._place | changes, environ={})

    def granted(self, role: Role, *, tenant: str = "a", less: str = "", **changes: Any) -> Config:
        """The settings that ``role`` gets, after the server got its ACL less one command."""
        found = access_of(self.settings(), role, tenant=tenant)
        assert found.acl is not None
        words = found.acl.replace(">PASSWORD", ">secret").split()
        assert words[0] == "user"
        if less:
            words.remove(less)
        for node in self.nodes:
            node.execute_command("ACL", "SETUSER", *words[1:])
            node.execute_command("SCRIPT", "FLUSH")
        return self.settings(**found.settings, redis_password="secret", **changes)

    def prepare(self, *, tenant: str | None = "a") -> None:
        """One chunk of the tenant, hot, saved with all rights; nothing for None."""
        for node in self.nodes:
            if node.info("replication")["role"] == "master":
                node.flushall()
        shutil.rmtree(self._folder, ignore_errors=True)
        if tenant is not None:
            found = access_of(self.settings(), "writer", tenant=tenant).settings["redis_prefix"]
            recorder = MemoryRecorder()
            with open_backends(self.settings(redis_prefix=found), recorder) as ends:
                save(ends, recorder, "admin")

    def work(self, config: Config, role: Role) -> None:
        self.prepare(tenant=None if role == "writer" else "a")
        WORK[role](config)


@pytest.fixture
def server(valkey: RedisServer, tmp_path: Path) -> Place:
    return Place(f"{valkey.url}/1", [valkey.client()], tmp_path / "bulk")


@pytest.fixture(params=["valkey", "redis_alone", "cluster"])
def each(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    found = request.getfixturevalue(request.param)
    if request.param == "cluster":
        nodes = [node.client() for node in (*found.primaries, *found.replicas)]
        return Place(found.url, nodes, tmp_path / "bulk")
    return Place(f"{found.url}/1", [found.client()], tmp_path / "bulk")


@pytest.mark.parametrize("role", ROLES)
def test_each_role_does_its_work_with_the_rights_that_are_printed(each: Place, role: Role) -> None:
    each.work(each.granted(role), role)


@pytest.mark.parametrize("role", ROLES)
def test_no_role_has_a_command_that_it_could_do_without(server: Place, role: Role) -> None:
    line = access_of(server.settings(), role, tenant="a").acl
    assert line is not None
    commands = [word for word in line.split() if word.startswith("+")]
    assert len(commands) >= 9

    def works(less: str) -> bool:
        config = server.granted(role, less=less, lookup_deadline_ms=1_000)
        try:
            server.work(config, role)
        except (StoreError, ConfigError, AssertionError):
            return False
        return True

    assert [command for command in commands if works(command)] == []


def test_a_user_that_is_there_already_keeps_nothing(server: Place) -> None:
    admin = server.admin
    admin.execute_command("ACL", "SETUSER", "objkv-a-reader", "on", "nopass", "~*", "&*", "+@all")
    server.granted("reader")
    told = admin.acl_getuser("objkv-a-reader")
    assert "nopass" not in told["flags"]
    assert told["keys"] == ["~objkv-a:*"]
    assert "+@all" not in str(told["commands"])


def test_commands_for_payloads_are_left_out_where_none_is_kept(server: Place) -> None:
    for role in ROLES:
        server.work(server.granted(role, hot_save_bytes_max=0), role)


WRITES: tuple[Callable[[RedisIndex], object], ...] = (
    lambda index: index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S),
    lambda index: index.touch(NAMESPACE, [HASH], ttl_s=LONG_S),
    lambda index: index.forget(NAMESPACE, HASH, FIELD, shard()),
    lambda index: index.lease("x", "me", ttl_ms=60_000),
    lambda index: index.release("x", "me"),
    lambda index: index.pin(NAMESPACE, HASH, until_s=2**33, ttl_s=LONG_S),
    lambda index: index.drop(NAMESPACE, HASH),
    lambda index: index.set_usage(Usage(NAMESPACE, 1, 1, 1)),
)
HOT_WRITES: tuple[Callable[[Any], object], ...] = (
    lambda hot: hot.put(PATH, b"x"),
    lambda hot: hot.put_if_absent("k", b"x"),
    lambda hot: hot.delete(PATH),
)


def raw(config: Config) -> RedisIndex:
    """The index alone, so that the server's own reply is visible."""
    return RedisIndex(connect_redis(config), prefix=config.redis_prefix)


def refused(config: Config, *calls: Callable[[RedisIndex], object]) -> None:
    with closing(raw(config)) as index:
        for call in calls:
            with pytest.raises(StoreDenied, match="the ACL"):
                call(index)


def hot_refused(config: Config, *calls: Callable[[Any], object]) -> None:
    for call in calls:
        with open_backends(config, NullRecorder()) as ends:
            assert ends.hot is not None
            with pytest.raises(StoreDenied, match="ACL"):
                call(ends.hot)


def test_a_reader_can_write_nothing_though_it_tries(server: Place) -> None:
    server.prepare()
    config = server.granted("reader").model_copy(update={"role": "writer"})
    refused(config, *WRITES, lambda index: index.check(), lambda index: index.namespaces())
    hot_refused(config, *HOT_WRITES)
    with open_backends(server.settings(redis_prefix="objkv-a"), NullRecorder()) as ends:
        assert ends.hot is not None
        assert ends.hot.head(PATH) is not None
        assert ends.index.lookup(NAMESPACE, [HASH]) != [None]


def test_a_writer_cannot_walk_what_others_have(server: Place) -> None:
    """The names of keys are the one thing that key patterns do not hide."""
    refused(server.granted("writer"), lambda index: index.namespaces())


@pytest.mark.parametrize("role", ROLES)
def test_no_role_of_a_tenant_reads_or_writes_anothers(server: Place, role: Role) -> None:
    server.prepare(tenant="b")
    config = server.granted(role, tenant="a")
    mine = config.model_copy(update={"role": "writer"})
    theirs = mine.model_copy(update={"redis_prefix": "objkv-b"})
    refused(
        theirs,
        *WRITES,
        lambda index: index.lookup(NAMESPACE, [HASH]),
        lambda index: index.find(NAMESPACE, [HASH], [FIELD]),
        lambda index: index.usage(),
    )
    hot_refused(theirs, *HOT_WRITES, lambda hot: hot.get(PATH))
    with closing(raw(mine)) as index:
        assert index.lookup(NAMESPACE, [HASH]) == [None]
        assert role != "sweeper" or index.namespaces() == []


@pytest.mark.parametrize("role", ROLES)
def test_each_role_does_its_work_as_terraforms_user(tmp_path: Path, role: Role) -> None:
    """As ElastiCache has them, where who gives no name does nothing."""
    rights = json.loads(FILE.read_text())["access_strings"]
    (nobody,) = re.findall(r'"default"\n.*?access_string = "([^"]+)"', MODULE.read_text(), re.S)
    users = {f"objkv-{one}": rights[one]["single"] for one in ROLES} | {"default": nobody}
    with valkey_server(tmp_path / "valkey") as started:
        place = Place(f"{started.url}/0", [started.client()], tmp_path / "bulk")
        if role != "writer":
            recorder = MemoryRecorder()
            with open_backends(place.settings(), recorder) as ends:
                save(ends, recorder, "admin")
        for name, access_string in users.items():
            words = access_string.replace("${redis_prefix}", "objkv").split()
            place.admin.execute_command("ACL", "SETUSER", name, "reset", ">secret", *words)
        login = {"redis_username": f"objkv-{role}", "redis_password": "secret"}
        WORK[role](place.settings(role=role, **login))
        for nameless in ({}, {"redis_password": "secret"}):
            config = place.settings(**nameless)
            with open_backends(config, NullRecorder()) as ends, pytest.raises(StoreDenied):
                ends.index.check()
