"""Creates every Redis client, from ``index_url`` and the settings.

Nothing connects before the first command, so a replica can start before its Redis does. Passwords
appear in no error and no repr.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import redis
from redis import exceptions
from redis.backoff import ExponentialWithJitterBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
)

from objkv.assembly import backends
from objkv.assembly.credentials import load_credentials
from objkv.config import Config, Url, is_this_machine, parse_url
from objkv.errors import ConfigError, StoreUnavailable
from objkv.index.base import ServerFacts
from objkv.net.deadline import ends_s
from objkv.net.redis_errors import CLIENT_ERRORS, NotTried
from objkv.net.resp import DeadlinePool, keep_deadlines


class ClearConnection(redis.Connection):
    """A connection without TLS to a server on this machine. The settings check ``index_url``. Hosts
    that a cluster or a Sentinel reports are checked here, before a password is sent to them."""

    def _connect(self) -> Any:
        if not is_this_machine(str(self.host)):
            raise NotTried(
                f"a server on this machine redirected to {self.host}, another machine, which "
                "would send credentials and payloads over the network unencrypted: use "
                "rediss, or set allow_plaintext to index on a private network"
            )
        return super()._connect()  # type: ignore[no-untyped-call]


class ClearSentinelConnection(ClearConnection, SentinelManagedConnection):
    """The same, for the primary that a Sentinel reports."""


Client = redis.Redis | redis.RedisCluster
CLIENT_NAME = "objkv"
HEALTH_CHECK_S = 30
"""A connection that was idle for longer is tested with PING before it carries a command."""
RETRIES = 1
"""Enough for a connection that the server closed; the breaker handles longer faults."""
CLUSTER_RETRIES = 3
"""Each retry rereads the topology; enough to follow a completed fail-over."""
_CONNECTIONS_MIN = 16
"""Of each of the two clients, or as many as threads that load: a lookup takes a millisecond."""
_PORTS = {"redis": 6379, "cluster": 6379, "sentinel": 26379}


def connect_redis(config: Config) -> Client:
    """Return a client that returns bytes; the caller closes it. Raises ``ConfigError``."""
    place = parse_url("index_url", config.index_url)
    kind = place.scheme.partition("+")[2] or "redis"
    hosts = [(host, port or _PORTS[kind]) for host, port in place.hosts]
    options = _options(place, config)
    match kind:
        case "redis":
            host, port = hosts[0]
            made_by = redis.SSLConnection if place.is_tls else redis.Connection
            pool = DeadlinePool(host=host, port=port, connection_class=made_by, **options)
            return redis.Redis.from_pool(pool)
        case "sentinel":
            if not (place.is_tls or config.may_be_clear("index")):
                options["connection_class"] = ClearSentinelConnection
            return _sentinel(place, hosts, options, config)
        case _:
            if not (place.is_tls or config.may_be_clear("index")):
                options["connection_class"] = ClearConnection
            return cast(redis.RedisCluster, _LazyCluster(lambda: _cluster(place, hosts, options)))


def _options(place: Url, config: Config) -> dict[str, Any]:
    """Return the options of every connection.

    The time-outs only limit how long a dead server blocks, with floors above a lookup's deadline,
    which its caller enforces: a new socket with TLS costs more than a late reply.
    """
    deadline_s = config.lookup_deadline_ms / 1000
    read_s = backends.read_s(config)
    options: dict[str, Any] = {
        **_login(place, config),
        "db": int(place.path or 0),
        "client_name": CLIENT_NAME,
        # Every server and proxy supports RESP2, and nothing from RESP3 is needed.
        "protocol": 2,
        "socket_connect_timeout": max(backends.CONNECT_FLOOR_S, deadline_s),
        "socket_timeout": read_s,
        "socket_keepalive": True,
        "health_check_interval": HEALTH_CHECK_S,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.1), RETRIES),
        "max_connections": max(_CONNECTIONS_MIN, config.load_threads),
        # If all connections are in use, a caller waits as long as one call may last, then fails.
        "timeout": read_s,
    }
    return options | _tls_options(place, config)


def _login(place: Url, config: Config) -> dict[str, Any]:
    if config.redis_credentials is None:
        return {
            "username": config.redis_username or place.user or None,
            "password": config.redis_password or place.password or None,
        }
    if place.user or place.password:
        raise ConfigError("redis_credentials is set: remove user and password from index_url")
    provider = load_credentials(config.redis_credentials, config.redis_login_s)
    return {"credential_provider": provider}


def _tls_options(place: Url, config: Config) -> dict[str, Any]:
    files = {
        "redis_ca_file": ("ssl_ca_certs", config.redis_ca_file),
        "redis_cert_file": ("ssl_certfile", config.redis_cert_file),
        "redis_key_file": ("ssl_keyfile", config.redis_key_file),
    }
    given = {name: (option, path) for name, (option, path) in files.items() if path is not None}
    if not place.is_tls:
        if given:
            raise ConfigError(f"{', '.join(given)}: only used with TLS; use rediss in index_url")
        return {}
    if (config.redis_cert_file is None) != (config.redis_key_file is None):
        raise ConfigError("redis_cert_file and redis_key_file: set both or neither")
    for name, (_, path) in given.items():
        try:
            path.open("rb").close()
        except OSError as exc:
            raise ConfigError(f"{name} {path}: {exc.strerror}") from exc
    options = {option: str(path) for option, path in given.values()}
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **options}


def _sentinel(
    place: Url, hosts: list[tuple[str, int]], options: dict[str, Any], config: Config
) -> redis.Redis:
    # The default of "retry" waits for seconds.
    names = ("socket_connect_timeout", "socket_timeout", "socket_keepalive", "retry")
    # Sentinels have their own users, so they do not receive the name and password for Redis.
    shared = {n: value for n, value in options.items() if n in names or n.startswith("ssl_")}
    shared |= {"username": config.sentinel_username, "password": config.sentinel_password}
    sentinel = _Sentinels(  # type: ignore[no-untyped-call]  # its base class is
        hosts, sentinel_kwargs={"ssl": place.is_tls, **shared}
    )
    for asked in sentinel.sentinels:
        keep_deadlines(asked.connection_pool)
    pool = _SentinelPool(  # type: ignore[no-untyped-call]  # its base class is
        place.service, sentinel, ssl=place.is_tls, **options
    )
    keep_deadlines(pool)
    return redis.Redis.from_pool(pool)


class _Sentinels(Sentinel):
    """Gives the reason in one sentence if no primary is found; redis-py's message fills a page."""

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except exceptions.ConnectionError as exc:
            if isinstance(exc, exceptions.AuthenticationError):
                raise
            asked = self.sentinels[0]
        try:
            asked.ping()
        except exceptions.AuthenticationError as exc:
            fix = "check sentinel_username and sentinel_password"
            raise exceptions.AuthenticationError(f"a Sentinel: {exc}: {fix}") from exc
        except exceptions.RedisError as exc:
            raise MasterNotFoundError(f"no Sentinel in index_url answers: {exc}") from exc
        raise MasterNotFoundError(
            f"no Sentinel has a live primary {service_name!r}: check the service in index_url"
        )


class _SentinelPool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """Follows the primary, and waits for a free connection instead of failing."""


def _cluster(
    place: Url, hosts: list[tuple[str, int]], options: dict[str, Any]
) -> redis.RedisCluster:
    own = dict(options)
    for name in ("db", "retry", "health_check_interval"):
        del own[name]  # not for clusters
    (host, port), *others = hosts
    shown = f"[{host}]" if ":" in host else host
    return redis.RedisCluster(
        # The client accepts a pool class only with a URL.
        url=f"{'rediss' if place.is_tls else 'redis'}://{shown}:{port}",
        startup_nodes=[ClusterNode(*other) for other in others],
        connection_pool_class=DeadlinePool,
        retry=Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.1), CLUSTER_RETRIES),
        **own,
    )


class _LazyCluster:
    """Opens its ``RedisCluster`` on first use: its constructor queries the cluster."""

    def __init__(self, opened: Callable[[], redis.RedisCluster]) -> None:
        self._open = opened
        self._lock = threading.Lock()
        self._client: redis.RedisCluster | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return redis.RedisCluster  # so that isinstance recognizes a cluster

    def __getattr__(self, name: str) -> Any:
        left_s = ends_s() - time.monotonic()  # other threads may be opening it, one after another
        if not self._lock.acquire(timeout=min(max(0.0, left_s), threading.TIMEOUT_MAX)):
            raise exceptions.TimeoutError("the cluster did not report its topology in time")
        try:
            if self._client is None:
                self._client = self._open()
        finally:
            self._lock.release()
        return getattr(self._client, name)

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()


def describe_server(config: Config) -> ServerFacts:
    """Return version, memory policy and clock of the server, or of one node of a cluster, by a
    connection of its own. Raises ``StoreUnavailable``; the facts list commands that the ACL denies.
    """
    client = connect_redis(config)
    try:
        node = client
        if isinstance(client, redis.RedisCluster):
            node = client.get_redis_connection(client.get_default_node())
        return describe_redis(node)
    except CLIENT_ERRORS as exc:
        raise StoreUnavailable(f"describe index: {exc}") from exc
    finally:
        client.close()


def describe_redis(node: Any, *, clock: Callable[[], float] = time.time) -> ServerFacts:
    """Return the facts of one server, read with ``INFO`` and ``TIME`` (ACL: ``+info +time``)."""
    denied: list[str] = []
    info: Mapping[str, Any] = _allowed(node.info, "INFO", denied) or {}
    before_s = clock()
    reply = _allowed(node.time, "TIME", denied)
    after_s = clock()
    skew_s = None
    if reply is not None:
        server_s = reply[0] + reply[1] / 1e6
        # The server read its clock at some moment in between: a late reply is not a wrong clock.
        skew_s = round(server_s - min(max(server_s, before_s), after_s), 3)
    valkey = info.get("valkey_version")
    return ServerFacts(
        product="valkey" if valkey else "redis",
        version=valkey or info.get("redis_version"),
        mode=info.get("server_mode") or info.get("redis_mode"),
        maxmemory_bytes=_number(info.get("maxmemory")),
        maxmemory_policy=info.get("maxmemory_policy"),
        used_bytes=_number(info.get("used_memory")),
        clock_skew_s=skew_s,
        denied=tuple(denied),
    )


def _allowed(call: Callable[[], Any], name: str, denied: list[str]) -> Any:
    try:
        return call()
    except exceptions.NoPermissionError:
        denied.append(name)
        return None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
