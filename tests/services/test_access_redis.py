"""The Redis rights of each role on a real Valkey: enough for its work, no command too many, and
nothing of another tenant's."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import check_backends, open_backends
from objkv.assembly.redis import connect_redis
from objkv.cache.lookup import LookupLimits, LookupService
from objkv.config import Config, Role, load_config
from objkv.errors import ConfigError, StoreDenied, StoreError
from objkv.index.base import Usage
from objkv.index.redis.index import RedisIndex
from objkv.ops.doctor.access import ROLES, access_of
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.codec.payloads import CLAIM
from tests.contracts.index_contract import LONG_S, chunk, shard
from tests.services.access_roles import FIELD, HASH, NAMESPACE, WORK, load, save
from tests.support.servers.fixtures import PATIENT, flushed
from tests.support.servers.redis import RedisServer, valkey_server, wait_until
from tests.support.servers.redis_groups import ServerGroup

pytestmark = pytest.mark.service

PATH = CLAIM.key.path()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def emptied(server: RedisServer) -> None:
    """Nothing is in either store any more."""
    server.client().flushall()
    shutil.rmtree(server.folder / "bulk", ignore_errors=True)


def settings(server: RedisServer, **changes: Any) -> Config:
    """Stores with all rights."""
    given = {"bulk_url": f"file://{server.folder}/bulk", "index_url": f"{server.url}/1", **PATIENT}
    return load_config(given | changes, environ={})


def granted(
    server: RedisServer, role: Role, *, tenant: str = "a", less: str = "", **changes: Any
) -> Config:
    """Return the settings that ``role`` gets, after the server got its ACL less one command."""
    found = access_of(settings(server), role, tenant=tenant)
    assert found.acl is not None
    words = found.acl.replace(">PASSWORD", ">secret").split()
    assert words[0] == "user"
    if less:
        words.remove(less)
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", *words[1:])
    admin.execute_command("SCRIPT", "FLUSH")
    return settings(server, **found.settings, redis_password="secret", **changes)


def prepare(server: RedisServer, *, tenant: str = "a") -> None:
    """One chunk of the tenant, hot, saved with all rights."""
    emptied(server)
    place = access_of(settings(server), "writer", tenant=tenant).settings["redis_prefix"]
    recorder = MemoryRecorder()
    with open_backends(settings(server, redis_prefix=place), recorder) as ends:
        save(ends, recorder, "admin")


def work(server: RedisServer, config: Config, role: Role) -> None:
    if role == "writer":
        emptied(server)
    else:
        prepare(server)
    WORK[role](config)


@pytest.mark.parametrize("role", ROLES)
def test_each_role_does_its_work_with_the_rights_that_are_printed(
    server: RedisServer, role: Role
) -> None:
    work(server, granted(server, role), role)


@pytest.mark.parametrize("role", ROLES)
def test_no_role_has_a_command_that_it_could_do_without(server: RedisServer, role: Role) -> None:
    line = access_of(settings(server), role, tenant="a").acl
    assert line is not None
    commands = [word for word in line.split() if word.startswith("+")]
    assert len(commands) >= 9
    needless = [command for command in commands if _works(server, role, less=command)]
    assert needless == []


def _works(server: RedisServer, role: Role, *, less: str) -> bool:
    config = granted(server, role, less=less, lookup_deadline_ms=1_000)
    try:
        work(server, config, role)
    except (StoreError, ConfigError, AssertionError):
        return False
    return True


def test_a_user_that_is_there_already_keeps_nothing(server: RedisServer) -> None:
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", "objkv-a-reader", "on", "nopass", "~*", "&*", "+@all")
    granted(server, "reader")
    told = admin.acl_getuser("objkv-a-reader")
    assert "nopass" not in told["flags"]
    assert told["keys"] == ["~objkv-a:*"]
    assert "+@all" not in str(told["commands"])


def test_commands_for_payloads_are_left_out_where_none_is_kept(server: RedisServer) -> None:
    for role in ROLES:
        work(server, granted(server, role, hot_payload_bytes_max=0), role)


def raw(config: Config) -> RedisIndex:
    """The index alone, so that the server's own reply is visible."""
    return RedisIndex(connect_redis(config.index_url, config), prefix=config.redis_prefix)


def refused(config: Config, *calls: Callable[[RedisIndex], object]) -> None:
    """Every call is refused by the server, for want of rights."""
    index = raw(config)
    try:
        for call in calls:
            with pytest.raises(StoreDenied, match="the ACL"):
                call(index)
    finally:
        index.close()


def test_a_reader_can_write_nothing_though_it_tries(server: RedisServer) -> None:
    prepare(server)
    config = granted(server, "reader").model_copy(update={"role": "writer"})
    refused(
        config,
        lambda index: index.check(),
        lambda index: index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S),
        lambda index: index.touch(NAMESPACE, [HASH], ttl_s=LONG_S),
        lambda index: index.forget(NAMESPACE, HASH, FIELD, shard()),
        lambda index: index.lease("x", "me", ttl_ms=60_000),
        lambda index: index.release("x", "me"),
        lambda index: index.pin(NAMESPACE, HASH, until_s=2**33, ttl_s=LONG_S),
        lambda index: index.drop(NAMESPACE, HASH),
        lambda index: index.set_usage(Usage(NAMESPACE, 1, 1, 1)),
        lambda index: index.namespaces(),
    )
    for write in (
        lambda hot: hot.put("k", b"x"),
        lambda hot: hot.put_if_absent("k", b"x"),
        lambda hot: hot.delete(PATH),
    ):
        with open_backends(config, NullRecorder()) as ends:
            assert ends.hot is not None
            with pytest.raises(StoreDenied, match="ACL"):
                write(ends.hot)
    with open_backends(settings(server, redis_prefix="objkv-a"), NullRecorder()) as ends:
        assert ends.hot is not None
        assert ends.hot.head(PATH) is not None
        assert ends.index.lookup(NAMESPACE, [HASH]) != [None]


def test_a_reader_that_was_not_told_so_is_refused_at_start_with_what_to_set(
    server: RedisServer,
) -> None:
    prepare(server)
    config = granted(server, "reader").model_copy(update={"role": "writer"})
    with open_backends(config, NullRecorder()) as ends, pytest.raises(ConfigError, match="role"):
        check_backends(ends, config)


def test_a_writer_cannot_walk_what_others_have(server: RedisServer) -> None:
    """The names of keys are the one thing that key patterns do not hide."""
    refused(granted(server, "writer"), lambda index: index.namespaces())


@pytest.mark.parametrize("role", ROLES)
def test_no_role_of_a_tenant_reads_or_writes_anothers(server: RedisServer, role: Role) -> None:
    prepare(server, tenant="b")
    config = granted(server, role, tenant="a")
    mine = config.model_copy(update={"role": "writer"})
    theirs = mine.model_copy(update={"redis_prefix": "objkv-b"})
    refused(
        theirs,
        lambda index: index.lookup(NAMESPACE, [HASH]),
        lambda index: index.find(NAMESPACE, [HASH], [FIELD]),
        lambda index: index.usage(),
        lambda index: index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S),
        lambda index: index.touch(NAMESPACE, [HASH], ttl_s=LONG_S),
        lambda index: index.lease("x", "me", ttl_ms=60_000),
        lambda index: index.drop(NAMESPACE, HASH),
        lambda index: index.set_usage(Usage(NAMESPACE, 1, 1, 1)),
    )
    for call in (lambda hot: hot.get(PATH), lambda hot: hot.put(PATH, b"x")):
        with open_backends(theirs, NullRecorder()) as ends:
            assert ends.hot is not None
            with pytest.raises(StoreDenied, match="ACL"):
                call(ends.hot)
    index = raw(mine)
    assert index.lookup(NAMESPACE, [HASH]) == [None]
    if role == "sweeper":
        assert index.namespaces() == []
    index.close()


def test_two_prefixes_on_one_server_share_nothing(server: RedisServer) -> None:
    """Also without rights, if the operator only forgot to separate tenants by ACL."""
    prepare(server, tenant="a")
    ours = settings(server, redis_prefix="objkv-a")
    with open_backends(ours, MemoryRecorder()) as ends:
        assert load(ends, MemoryRecorder())
    for prefix in ("objkv", "objkv-b", "objkv-"):
        with open_backends(settings(server, redis_prefix=prefix), MemoryRecorder()) as ends:
            assert not load(ends, MemoryRecorder())
            assert ends.index.namespaces() == []
            assert ends.index.usage() == []
            assert ends.hot is not None
            assert list(ends.hot.scan("")) == []


def test_rights_that_are_taken_away_are_misses_until_they_are_back(server: RedisServer) -> None:
    """On connections that stay open: only the replies inform a replica."""
    prepare(server)
    config = granted(server, "reader", breaker_reset_ms=1, breaker_reset_max_ms=1)
    recorder = MemoryRecorder()
    with open_backends(config, recorder) as ends:
        lookups = LookupService(ends.index, (FIELD,), recorder, LookupLimits(120.0, 8))
        asked = itertools.count()

        def hit() -> bool:
            request = str(next(asked))
            while (found := lookups.ask(request, NAMESPACE, (HASH,))) is None:
                lookups.wait(120.0)
            return found[0] is not None

        assert hit()
        admin = server.client()
        admin.execute_command("ACL", "SETUSER", "objkv-a-reader", "resetkeys")
        recorder.drain()
        assert not hit()
        assert recorder.drain()["lookup_errors"] == 1
        admin.execute_command("ACL", "SETUSER", "objkv-a-reader", "~objkv-a:*")
        wait_until(hit, "hits again")
        admin.execute_command("ACL", "SETUSER", "objkv-a-reader", "off")
        admin.client_kill_filter(_type="normal", skipme=True)
        assert not hit()
        admin.execute_command("ACL", "SETUSER", "objkv-a-reader", "on")
        wait_until(hit, "hits again")
        lookups.close()


@pytest.mark.parametrize("role", ROLES)
def test_each_role_does_its_work_on_a_cluster(
    cluster: ServerGroup, tmp_path: Path, role: Role
) -> None:
    flushed(*cluster.primaries)
    bulk_url = f"file://{tmp_path}/b"
    all_rights = load_config(
        {"bulk_url": bulk_url, "index_url": cluster.url, **PATIENT}, environ={}
    )
    found = access_of(all_rights, role, tenant="a")
    assert found.acl is not None
    words = found.acl.replace(">PASSWORD", ">secret").split()
    for node in [*cluster.primaries, *cluster.replicas]:
        node.client().execute_command("ACL", "SETUSER", *words[1:])
    if role != "writer":
        recorder = MemoryRecorder()
        place = all_rights.model_copy(update={"redis_prefix": found.settings["redis_prefix"]})
        with open_backends(place, recorder) as ends:
            save(ends, recorder, "admin")
    given = {"bulk_url": bulk_url, "index_url": cluster.url, "redis_password": "secret"}
    WORK[role](load_config(PATIENT | given | found.settings, environ={}))
