"""Opens stores and index from the settings, each behind its guard (``objkv.net.guard``).

Opening sends nothing and creates nothing: errors appear in the first call, or in
``check_backends``. The clients of Redis and S3 take a second to import, so only what is used is.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from threading import Thread

from objkv.cache.bulk_index import BulkIndex
from objkv.cache.quota import FULL_PERCENT, AutoSweep, Quota, TenantUsage
from objkv.config import Config, cache_folder, is_directory_bucket, local_path, parse_url
from objkv.config.aws import s3_endpoint
from objkv.config.sources import ENV_PREFIX
from objkv.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import PruneIndex, ServerFacts, WriteIndex
from objkv.index.guarded import INDEX_VERBS, GuardedIndex
from objkv.index.sqlite.index import SqliteIndex
from objkv.net.breaker import BreakerLimits, Breakers
from objkv.net.guard import Guard
from objkv.stores.base import HotStore, LifecycleRules, PruneStore
from objkv.stores.guarded import STORE_VERBS, GuardedStore, GuardedValues
from objkv.stores.local import LocalStore
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
CONNECT_FLOOR_S, READ_FLOOR_S = 1.0, 2.0
"""Shortest time limits for connecting to Redis, and for one of its replies."""
_CHECK_FACTOR = 2
"""Multiple of ``load_deadline_ms``: stores with a deadline have ended by then."""


@dataclass(frozen=True, slots=True)
class Backends(AbstractContextManager["Backends"]):
    """Open stores and index. A context manager that closes them."""

    bulk: PruneStore
    hot: HotStore | None
    """None if the index is not Redis, or if payloads are not kept there. It has its own
    connections, because a lookup must not wait behind a payload."""
    index: WriteIndex
    admin: PruneIndex | None = None
    """For operators: the index itself, None if ``role`` is reader. Closed by ``index``."""

    def close(self) -> None:
        """Close all of them, even if one fails. Idempotent."""
        with ExitStack() as stack:
            for one in (self.hot, self.index, self.bulk):
                if one is not None:
                    stack.callback(one.close)

    def __exit__(self, *_: object) -> None:
        self.close()


def open_backends(
    config: Config, recorder: Recorder, *, logs: bool = True, of_agent: bool = False
) -> Backends:
    """Open bulk store, index and hot store. ``logs``: see ``Breakers``. ``of_agent``: for a node
    agent, which may fetch with processes of its own. Raises ``ConfigError``."""
    bulk = open_bulk(config, recorder, logs=logs, of_agent=of_agent)
    place = _index_place(config)
    guard = _guard("index", config, recorder, logs=logs)
    index: WriteIndex = GuardedIndex(place, guard)
    if config.index_url.startswith("redis"):
        from objkv.cache.bulk_index import ListedIndex

        index = ListedIndex(place, guard, bulk)
    hot = open_hot(config, recorder, logs=logs)
    return Backends(bulk, hot, index, None if config.role == "reader" else place)


def open_bulk(
    config: Config, recorder: Recorder, *, logs: bool = True, of_agent: bool = False
) -> PruneStore:
    """Open the bulk store, guarded. ``of_agent``: see ``open_backends``."""
    guard = _guard("bulk", config, recorder, logs=logs)
    if config.bulk_url.startswith("file:"):
        return GuardedStore(_folder(config.bulk_url), guard)
    from objkv.assembly.fetchers import open_s3, open_s3_of_agent

    place = open_s3_of_agent(config, recorder) if of_agent else open_s3(config)
    return GuardedStore(place, guard)


def open_hot(config: Config, recorder: Recorder, *, logs: bool = True) -> HotStore | None:
    """Open the hot store, or return None without Redis or with ``hot_save_bytes_max`` 0. It is
    guarded like the bulk store, but limited by its connections."""
    if config.hot_save_bytes_max == 0 or not config.index_url.startswith("redis"):
        return None
    from objkv.assembly.redis import connect_redis
    from objkv.stores.redis import RedisStore

    client = connect_redis(config)
    # Next to the index's own keys, so that one ACL pattern covers all.
    place = RedisStore(client, prefix=f"{config.redis_prefix}:p:", ttl_s=config.ttl_s)
    return GuardedValues(place, _guard("hot", config, recorder, logs=logs))


def read_s(config: Config) -> float:
    """Return the maximum seconds for one reply of Redis."""
    return max(READ_FLOOR_S, 2 * config.lookup_deadline_ms / 1000)


def call_s(config: Config) -> float:
    """Return the maximum seconds for one call of Redis: for connecting, plus twice the limit of one
    reply, for waiting for a connection and for repeating the command."""
    return CONNECT_FLOOR_S + 2 * read_s(config)


def open_index(config: Config, recorder: Recorder, *, logs: bool = True) -> WriteIndex:
    """Open the index alone, guarded."""
    return GuardedIndex(_index_place(config), _guard("index", config, recorder, logs=logs))


def read_lifecycle(config: Config) -> LifecycleRules | None:
    """Return a bucket's lifecycle rules, None if there are none to read. Raises ``StoreError``."""
    place = parse_url("bulk_url", config.bulk_url)
    if place.scheme != "s3" or is_directory_bucket(place.host):
        return None
    from objkv.assembly.fetchers import open_s3

    with closing(open_s3(config)) as store:
        return store.lifecycle()


def describe_index(config: Config) -> ServerFacts | None:
    """Return the facts of the index's server, if it has one. Raises ``StoreUnavailable``."""
    if not config.index_url.startswith("redis"):
        return None
    from objkv.assembly.redis import describe_server

    return describe_server(config)


def check_backends(backends: Backends, config: Config) -> None:
    """Check store and index with one round trip each. A refusal raises ``ConfigError``. One that is
    unreachable is a warning, or with ``at_start`` strict a ``StoreError`` that names it."""
    if config.role == "sweeper":
        raise ConfigError("role sweeper is not for replicas: set role to writer or reader")
    public = config.public()
    ends: tuple[tuple[str, Callable[[], None], str], ...] = (
        ("bulk store", backends.bulk.check, public["bulk_url"]),
        ("index", backends.index.check, public["index_url"]),
    )
    for name, check, shown in ends:
        try:
            within(_CHECK_FACTOR * config.load_deadline_ms / 1000, check)
        except StoreDenied as exc:
            raise ConfigError(f"{name} {shown}: {exc}") from exc
        except StoreError as exc:
            if config.at_start == "strict":
                raise type(exc)(
                    f"{name} {shown} is unreachable, and at_start is strict: {exc}"
                ) from exc
            logger.warning(
                "%s unreachable at start, serving without it url=%s error=%s", name, shown, exc
            )


def within(seconds: float, check: Callable[[], None]) -> None:
    """Run ``check`` on a thread. If it hangs, abandon it and raise ``StoreUnavailable``."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            check()
            outcome.set_result(None)
        except BaseException as exc:
            outcome.set_exception(exc)

    Thread(target=run, name="objkv-check", daemon=True).start()
    if not wait([outcome], seconds).done:
        raise StoreUnavailable(f"no response within {seconds:g} s")
    outcome.result()


def _guard(end: str, config: Config, recorder: Recorder, *, logs: bool) -> Guard:
    # Loads near their deadline have less time; all others detect a stalled store.
    enough_s = min(1.0, config.load_deadline_ms / 2000, config.step_load_deadline_ms / 2000)
    return Guard(
        end,
        INDEX_VERBS if end == "index" else STORE_VERBS,
        recorder,
        Breakers(end, BreakerLimits(enough_s=enough_s), recorder, logs=logs),
        seconds=None if end == "bulk" else call_s(config),  # those have deadlines of their own
        may_write=config.role != "reader",
    )


def _folder(url: str) -> LocalStore:
    # The default folder is private, because it holds data from this user's prompts. In other
    # folders the umask decides. A user without a home has no default folder.
    private = None
    with suppress(ConfigError):
        private = cache_folder()
    return LocalStore(local_path(url), private=private)


def _index_place(config: Config) -> PruneIndex:
    scheme = config.index_url.partition(":")[0]
    if scheme == "bulk":
        return BulkIndex(_folder(config.bulk_url))
    if scheme == "sqlite":
        return SqliteIndex(local_path(config.index_url))
    from objkv.assembly.redis import connect_redis
    from objkv.index.redis.index import RedisIndex

    return RedisIndex(connect_redis(config), prefix=config.redis_prefix)


def is_far(config: Config) -> bool:
    """Whether payloads cross a network, so that compression may pay. A directory does not count,
    because loads from it mostly come from memory, even if its disk makes puts slow."""
    if not config.bulk_url.startswith("s3:"):
        return False
    _, endpoint = s3_endpoint(config)
    return endpoint is None or endpoint.is_far


_OF_SWEEPS = (
    *("bulk_url", "index_url", "tenant", "ttl_s", "quota_bytes", "sweep_grace_s"),
    # Paths and commands, not keys: without them sealed payloads could not get a record.
    *("signing_keys_file", "signing_keys_command"),
    *("encryption_keys_file", "encryption_keys_command"),
)


def open_room(config: Config, backends: Backends, recorder: Recorder) -> Quota | None:
    """Return the check that ``quota_bytes`` requires. Reads nothing yet. A local folder with a
    local index is walked, so that payloads with expired records count, and swept when full. Of
    shared stores the index has the totals, and operators sweep them."""
    if not config.quota_bytes:
        return None
    is_ours = config.bulk_url.startswith("file:") and config.index_url.startswith("sqlite:")
    usage = BulkIndex(backends.bulk).usage if is_ours else backends.index.usage
    return Quota(
        TenantUsage(usage, backends.bulk, config.tenant),
        max(1, config.quota_bytes * FULL_PERCENT // 100),
        recorder,
        relief=AutoSweep(backends.index, sweep_settings(config), recorder) if is_ours else None,
    )


def sweep_settings(config: Config) -> dict[str, str]:
    """Return the environment variables for a sweep that makes room here."""
    values = {name: getattr(config, name) for name in _OF_SWEEPS} | {"role": "sweeper"}
    return {ENV_PREFIX + n.upper(): str(value) for n, value in values.items() if value is not None}
