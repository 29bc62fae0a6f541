"""Logins at real servers: credentials that expire, Sentinels with a login of their own, and hosts
that nobody sends a password to in clear."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis import exceptions

from objkv.assembly import credentials
from objkv.assembly.redis import ClearConnection, connect_redis
from objkv.config import Config
from objkv.errors import ConfigError, StoreError, StoreUnavailable
from objkv.index.redis.index import RedisIndex
from objkv.redact import without_secrets
from objkv.stores.redis import RedisStore
from tests.support.servers.fixtures import PATIENT
from tests.support.servers.ports import free_port
from tests.support.servers.redis import RedisServer, valkey_binary, valkey_server

pytestmark = pytest.mark.slow
HERE = __name__


class Tokens:
    def __init__(self) -> None:
        self.token = "token-of-monday"
        self.calls = 0

    def get_credentials(self) -> tuple[str, str]:
        self.calls += 1
        return "replica", self.token


TOKENS = Tokens()


def provider() -> Tokens:
    return TOKENS


@pytest.fixture
def tokens(valkey: RedisServer) -> Iterator[Tokens]:
    TOKENS.__init__()  # type: ignore[misc]  # the provider of a process is made once
    with valkey.client() as admin:
        admin.flushall()
        rotate(admin, TOKENS, TOKENS.token)
        yield TOKENS
        admin.execute_command("ACL", "DELUSER", "replica")


def rotate(admin: redis.Redis, tokens: Tokens, token: str) -> None:
    """Give the user a new password, and end all logins with the old one, as Entra does."""
    admin.execute_command("ACL", "SETUSER", "replica", "reset", "on", f">{token}", "~*", "+@all")
    admin.execute_command("CLIENT", "KILL", "USER", "replica", "SKIPME", "yes")
    tokens.token = token


def config_of(valkey: RedisServer, **settings: Any) -> Config:
    given = {"index_url": valkey.url, "redis_credentials": f"{HERE}:provider"}
    return Config.model_validate(given | settings)


def test_a_password_that_rotates_costs_no_call(valkey: RedisServer, tokens: Tokens) -> None:
    config = config_of(valkey)
    store = RedisStore(connect_redis(config), prefix="p:", ttl_s=60)
    buffer = bytearray(3)
    with valkey.client() as admin:
        for number in range(3):
            store.put("k", b"abc")
            assert store.get_into("k", memoryview(buffer)) == 3
            rotate(admin, tokens, f"token-number-{number}")
        assert store.get("k") == b"abc"
    assert "token-number-2" not in without_secrets("AUTH replica token-number-2")
    assert "token-" not in repr(store) + repr(config)


def test_logins_are_renewed_while_connections_live(valkey: RedisServer, tokens: Tokens) -> None:
    config = config_of(valkey, redis_login_s=1)
    client = connect_redis(config)
    index = RedisIndex(client)
    store = RedisStore(client, prefix="p:", ttl_s=60)
    store.put("k", b"abc")
    index.check()
    with valkey.client() as admin:
        first = {one["id"] for one in admin.client_list() if one["user"] == "replica"}
        assert first
        time.sleep(1.1)  # logins must grow old
        index.check()
        assert store.get_into("k", memoryview(bytearray(3))) == 3
        later = {one["id"] for one in admin.client_list() if one["user"] == "replica"}
    assert later
    assert not first & later
    assert tokens.calls >= 2


@pytest.mark.parametrize("found", [None, (), ("a", 1), ("a", "b", "c"), "user:password"])
def test_other_results_are_refused_without_being_shown(found: Any) -> None:
    class Wrong:
        def get_credentials(self) -> Any:
            return found

    renewed = credentials.RenewedCredentials(Wrong, 9.0, name="m:f")
    with pytest.raises(redis.ConnectionError, match=r"m:f must return") as caught:
        renewed.get_credentials()
    assert "password)" in str(caught.value)
    assert "user:password" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"redis_credentials": "nowhere_at_all:f"}, "cannot be imported: ModuleNotFoundError"),
        ({"redis_credentials": f"{HERE}:nothing"}, "cannot be imported: AttributeError"),
        ({"redis_credentials": f"{HERE}:HERE"}, "is not callable"),
        ({"index_url": "redis://u:pw-12@localhost"}, "remove user and password from index_url"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, str], words: str) -> None:
    given = {"redis_credentials": f"{HERE}:provider", "index_url": "redis://localhost"} | settings
    config = Config.model_validate(given)
    with pytest.raises(ConfigError, match=words):
        connect_redis(config)


def test_a_login_has_one_source() -> None:
    with pytest.raises(ValueError, match="remove redis_username and redis_password"):
        Config(redis_credentials="a:b", redis_password="hush")


LOGINS = [
    ("requirepass watch-secret", {"sentinel_password": "watch-secret"}),
    (
        "user default off\nuser watcher on >watch-secret allchannels +@all",
        {"sentinel_username": "watcher", "sentinel_password": "watch-secret"},
    ),
]


@pytest.mark.parametrize(("demand", "login"), LOGINS)
def test_a_sentinel_with_its_own_login(tmp_path: Path, demand: str, login: dict[str, str]) -> None:
    port = free_port()
    conf = tmp_path / "sentinel.conf"
    with valkey_server(tmp_path / "primary", args=("--requirepass", "data-secret")) as primary:
        conf.write_text(
            f"port {port}\nsentinel monitor objkv 127.0.0.1 {primary.port} 1\n"
            f"sentinel auth-pass objkv data-secret\n{demand}\n"
        )
        url = f"redis+sentinel://127.0.0.1:{port}/0?service=objkv"

        def opened(**settings: str) -> RedisIndex:
            config = Config(index_url=url, redis_password="data-secret", **PATIENT, **settings)
            return RedisIndex(connect_redis(config))

        args = (str(conf), "--sentinel")
        with RedisServer(valkey_binary(), tmp_path, port=port, args=args).start():
            opened(**login).check()
            with pytest.raises(StoreError):
                opened().check()
            with pytest.raises(StoreError):
                opened(**(login | {"sentinel_password": "data-secret"})).check()


ELSEWHERE = "203.0.113.1"

"""An address reserved for documentation: no machine has it."""


def refused(url: str) -> None:
    with pytest.raises(
        StoreUnavailable, match=f"a server on this machine redirected to {ELSEWHERE}"
    ):
        RedisIndex(connect_redis(Config(index_url=url))).check()


def test_a_cluster_that_names_another_machine_is_refused(tmp_path: Path) -> None:
    args = ("--cluster-enabled", "yes", "--cluster-announce-ip", ELSEWHERE)
    with valkey_server(tmp_path, args=args) as server:
        server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        refused(f"redis+cluster://127.0.0.1:{server.port}")


def test_a_sentinel_that_names_another_machine_is_refused(tmp_path: Path) -> None:
    port = free_port()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(f"port {port}\nsentinel monitor objkv {ELSEWHERE} 6379 1\n")
    with RedisServer(valkey_binary(), tmp_path, port=port, args=(str(conf), "--sentinel")).start():
        refused(f"redis+sentinel://127.0.0.1:{port}/0?service=objkv")


def test_nothing_is_sent_before_the_host_was_judged() -> None:
    connection = ClearConnection(host=ELSEWHERE, port=1, password="hush", retry_on_error=[])
    with pytest.raises(exceptions.ConnectionError, match="allow_plaintext") as caught:
        connection.connect()
    assert "hush" not in str(caught.value)
