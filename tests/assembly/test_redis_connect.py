from pathlib import Path
from unittest.mock import Mock

import pytest
import redis

from objkv.assembly.redis import connect_redis, describe_redis
from objkv.config import Config
from objkv.errors import ConfigError


def options(url: str, **settings: object) -> dict[str, object]:
    client = connect_redis(Config.model_validate({"index_url": url, **settings}))
    assert isinstance(client, redis.Redis)
    return client.connection_pool.connection_kwargs


def test_user_and_password_come_from_the_url_unless_they_are_set() -> None:
    url = "redis://user:p%40ss@localhost"
    assert options(url)["username"] == "user"
    assert options(url)["password"] == "p@ss"
    both = options(url, redis_username="other", redis_password="hush")
    assert (both["username"], both["password"]) == ("other", "hush")


def test_a_sentinel_never_gets_the_password_of_redis() -> None:
    url = "redis+sentinel://localhost?service=s"
    client = connect_redis(Config(index_url=url, redis_username="u", redis_password="hush"))
    for sentinel in client.connection_pool.sentinel_manager.sentinels:
        given = sentinel.connection_pool.connection_kwargs
        assert (given["username"], given["password"]) == (None, None)


def test_pools_are_bounded_and_wait() -> None:
    for url in ("redis://localhost", "redis+sentinel://localhost?service=s"):
        client = connect_redis(Config(index_url=url, load_threads=20))
        assert isinstance(client, redis.Redis)
        pool = client.connection_pool
        assert isinstance(pool, redis.BlockingConnectionPool)
        assert (pool.max_connections, pool.timeout) == (20, 2.0)


def test_time_outs_grow_with_the_lookup_deadline_but_have_floors() -> None:
    quick, slow = (
        options("redis://localhost"),
        options("redis://localhost", lookup_deadline_ms=5_000),
    )
    assert (quick["socket_connect_timeout"], quick["socket_timeout"]) == (1.0, 2.0)
    assert (slow["socket_connect_timeout"], slow["socket_timeout"]) == (5.0, 10.0)


def test_tls_checks_certificate_and_host_name(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).touch()
    files = {f"redis_{name}_file": tmp_path / name for name in ("ca", "cert", "key")}
    given = options("rediss://h", **files)
    assert given["ssl_check_hostname"] is True
    assert given["ssl_cert_reqs"] == "required"
    assert given["ssl_ca_certs"] == str(tmp_path / "ca")
    assert (given["ssl_certfile"], given["ssl_keyfile"]) == (
        str(tmp_path / "cert"),
        str(tmp_path / "key"),
    )


@pytest.mark.parametrize(
    ("url", "names", "words"),
    [
        ("redis://localhost", ["redis_ca_file"], "redis_ca_file: only used with TLS"),
        ("rediss://h", ["redis_cert_file"], "set both or neither"),
        ("rediss://h", ["redis_ca_file"], "No such file"),
    ],
)
def test_tls_files_that_cannot_be_used_are_refused(
    url: str, names: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        options(url, **dict.fromkeys(names, tmp_path / "missing.pem"))


ASKED_S, ANSWERED_S = 1_000.0, 1_030.0


@pytest.mark.parametrize(
    ("told", "skew_s"),
    [((990, 0), -10.0), ((1_000, 0), 0.0), ((1_029, 500_000), 0.0), ((1_031, 500_000), 1.5)],
)
def test_an_answer_that_is_late_is_no_wrong_clock(told: tuple[int, int], skew_s: float) -> None:
    server = Mock(redis.Redis)
    server.info.return_value = {}
    server.time.return_value = told
    facts = describe_redis(server, clock=iter([ASKED_S, ANSWERED_S]).__next__)
    assert facts.clock_skew_s == skew_s
