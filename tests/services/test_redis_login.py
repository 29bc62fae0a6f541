"""Servers that demand a login: Sentinels with a password or an ACL user of their own."""

from pathlib import Path

import pytest

from objkv.assembly.redis import connect_redis
from objkv.config import Config
from objkv.errors import StoreError
from objkv.index.redis.index import RedisIndex
from tests.support.servers.fixtures import PATIENT
from tests.support.servers.ports import free_port
from tests.support.servers.redis import RedisServer, valkey_binary, valkey_server

pytestmark = pytest.mark.service

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
            return RedisIndex(connect_redis(url, config))

        args = (str(conf), "--sentinel")
        with RedisServer(valkey_binary(), tmp_path, port=port, args=args).start():
            opened(**login).check()
            with pytest.raises(StoreError):
                opened().check()
            with pytest.raises(StoreError):
                opened(**(login | {"sentinel_password": "data-secret"})).check()
