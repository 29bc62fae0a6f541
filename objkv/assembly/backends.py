"""Opens stores and index as the settings say, each behind its guard (``objkv.net.guard``).

Opening sends nothing and creates nothing: what is wrong shows in the first call, or in
``check_backends``. The clients of Redis and S3 are imported only if the settings name such a place:
the two take a second.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from objkv.assembly.call_times import call_s
from objkv.cache.bulk_index import BulkIndex
from objkv.cache.quota import Quota, Room, TenantUsage, Unlimited
from objkv.config import Config, cache_folder, local_path, without_password
from objkv.config.sources import ENV_PREFIX
from objkv.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import PruneIndex, WriteIndex
from objkv.index.guarded import INDEX_VERBS, GuardedIndex
from objkv.index.memory import MemoryIndex
from objkv.index.sqlite.index import SqliteIndex
from objkv.net.breaker import Breakers, Change, OnChange, Patience
from objkv.net.guard import Guard, Slots
from objkv.ops.doctor.server import ServerFacts
from objkv.ops.sweep.auto import AutoSweep
from objkv.stores.base import PruneStore
from objkv.stores.guarded import STORE_VERBS, GuardedStore
from objkv.stores.local import LocalStore
from objkv.stores.memory import MemoryStore
from objkv.stores.singleflight import SharedGets
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
_CHECK_FACTOR = 2
"""Of ``load_deadline_ms``: stores that keep a deadline are over by then."""


@dataclass(frozen=True, slots=True)
class Backends:
    """Stores and index, open. A context manager that closes them."""

    bulk: PruneStore
    hot: PruneStore | None
    """None where the index is no Redis, or payloads are not kept there. On connections of its own:
    a lookup must not wait behind a payload."""
    index: WriteIndex
    admin: PruneIndex | None = None
    """The index itself, on which operators pin, drop and count; None where ``role`` is reader.
    ``index`` closes it."""

    def close(self) -> None:
        """Close all of them, also after one that fails. Idempotent."""
        try:
            self.bulk.close()
        finally:
            try:
                self.index.close()
            finally:
                if self.hot is not None:
                    self.hot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_backends(
    config: Config, recorder: Recorder, *, on_change: OnChange | None = None
) -> Backends:
    """Bulk store, index and hot store.

    ``on_change`` is called when a circuit opens and when it closes; by default that is logged.
    Raises ``ConfigError``.
    """
    bulk = open_bulk(config, recorder, on_change=on_change)
    place = _index_place(config)
    index = _guarded_index(place, config, recorder, on_change)
    hot = open_hot(config, recorder, on_change=on_change)
    return Backends(bulk, hot, index, None if config.role == "reader" else place)


def open_bulk(
    config: Config, recorder: Recorder, *, on_change: OnChange | None = None
) -> PruneStore:
    """The bulk store: a burst of gets of one key is one call of the guarded store."""
    wait_s = config.load_deadline_ms / 1000
    guard = Guard(
        "bulk",
        STORE_VERBS,
        recorder,
        _breakers("bulk", config, recorder, on_change),
        slots=Slots(config.bulk_calls_max, wait_s),
        may_write=config.role != "reader",
    )
    return SharedGets(GuardedStore(_bulk_place(config, recorder), guard), wait_s=wait_s)


def open_hot(
    config: Config, recorder: Recorder, *, on_change: OnChange | None = None
) -> PruneStore | None:
    """The hot store, or None without Redis or with ``hot_payload_bytes_max`` 0. Guarded as the bulk
    store is, but its connections are its limit, and payloads this small are not worth sharing."""
    if config.hot_payload_bytes_max == 0 or not config.index_url.startswith("redis"):
        return None
    from objkv.assembly.redis import connect_redis
    from objkv.stores.redis import RedisStore

    client = connect_redis(config.index_url, config)
    # Beside the index's own keys, so that one ACL pattern allows all.
    place = RedisStore(client, prefix=f"{config.redis_prefix}:p:", ttl_s=config.ttl_s)
    guard = Guard(
        "hot",
        STORE_VERBS,
        recorder,
        _breakers("hot", config, recorder, on_change),
        seconds=call_s(config),
        may_write=config.role != "reader",
    )
    return GuardedStore(place, guard)


def open_index(
    config: Config, recorder: Recorder, *, on_change: OnChange | None = None
) -> WriteIndex:
    """The index alone, guarded."""
    return _guarded_index(_index_place(config), config, recorder, on_change)


def _guarded_index(
    place: PruneIndex, config: Config, recorder: Recorder, on_change: OnChange | None
) -> WriteIndex:
    guard = Guard(
        "index",
        INDEX_VERBS,
        recorder,
        _breakers("index", config, recorder, on_change),
        seconds=call_s(config),
        may_write=config.role != "reader",
    )
    return GuardedIndex(place, guard)


def describe_index(config: Config) -> ServerFacts | None:
    """Return version, memory policy and clock of the index's server; None if it has no server.
    Raises ``StoreUnavailable``."""
    if not config.index_url.startswith("redis"):
        return None
    from objkv.assembly.redis import describe_server

    return describe_server(config)


def check_backends(backends: Backends, config: Config) -> None:
    """One round trip each to store and index, judged by ``at_start``, before a replica uses them.

    A refusal is always a ``ConfigError``: the operator can act. A store or index that does not
    answer is a warning, or with ``strict`` a ``StoreError`` that names it.
    """
    if config.role == "sweeper":
        raise ConfigError("role is sweeper, which no replica is: set it to writer or reader")
    ends: tuple[tuple[str, Callable[[], None], str], ...] = (
        ("bulk store", backends.bulk.check, config.bulk_url),
        ("index", backends.index.check, config.index_url),
    )
    for name, check, url in ends:
        shown = without_password(url)
        try:
            _within(_CHECK_FACTOR * config.load_deadline_ms / 1000, check)
        except StoreDenied as exc:
            raise ConfigError(f"{name} {shown}: {exc}") from exc
        except StoreError as exc:
            if config.at_start == "strict":
                raise type(exc)(
                    f"{name} {shown} does not answer, and at_start is strict: {exc}"
                ) from exc
            logger.warning(
                "%s unreachable at start, serving without it url=%s error=%s", name, shown, exc
            )


def _within(seconds: float, check: Callable[[], None]) -> None:
    """``check``, on a thread that is left behind where it hangs, as on a file system whose server
    is gone: then ``StoreUnavailable``."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            check()
        except BaseException as exc:
            outcome.append(exc)
        else:
            outcome.append(None)

    thread = Thread(target=run, name="objkv-check", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise StoreUnavailable(f"no answer for {seconds:g} s")
    if outcome[0] is not None:
        raise outcome[0]


def log_change(change: Change) -> None:
    """The one line in the log for each change of a breaker."""
    what = f"{change.end} {change.direction}s"
    if change.error is None:
        logger.warning("%s work again", what)
    elif isinstance(change.error, StoreDenied):  # only an operator can end that
        logger.error("%s are refused, serving without them reason=%s", what, change.error)
    else:
        logger.warning("%s keep failing, serving without them reason=%s", what, change.error)


def _breakers(end: str, config: Config, recorder: Recorder, on_change: OnChange | None) -> Breakers:
    patience = Patience(
        config.breaker_failures,
        config.breaker_reset_ms / 1000,
        config.breaker_reset_max_ms / 1000,
        # Loads late in their time have less: all others find out a store that stalls.
        min(1.0, config.load_deadline_ms / 2000, config.step_load_deadline_ms / 2000),
    )
    return Breakers(end, patience, recorder, on_change=on_change or log_change)


def _bulk_place(config: Config, recorder: Recorder) -> PruneStore:
    url = config.bulk_url
    scheme = url.partition(":")[0]
    if scheme == "memory":
        return MemoryStore()
    if scheme == "file":
        return _folder(url)
    assert scheme == "s3"
    from objkv.stores.s3.client import open_s3_client
    from objkv.stores.s3.store import S3Store

    parts = urlsplit(url)
    return S3Store(
        open_s3_client(config),
        bucket=parts.netloc,
        prefix=parts.path.strip("/"),
        multipart_bytes=config.s3_multipart_bytes,
        range_bytes=config.s3_range_bytes,
        ranges_max=config.s3_ranges_max,
        hedge_percent_max=config.s3_hedge_percent_max,
        deadline_s=config.load_deadline_ms / 1000,
        recorder=recorder,
    )


def _folder(url: str) -> LocalStore:
    # The default one holds what this user's prompts made; of others the umask decides.
    return LocalStore(local_path(url), private=cache_folder())


def _index_place(config: Config) -> PruneIndex:
    scheme = config.index_url.partition(":")[0]
    if scheme == "memory":
        return MemoryIndex()
    if scheme == "bulk":
        return BulkIndex(_folder(config.bulk_url))
    if scheme == "sqlite":
        return SqliteIndex(local_path(config.index_url))
    from objkv.assembly.redis import connect_redis
    from objkv.index.redis.index import RedisIndex

    return RedisIndex(connect_redis(config.index_url, config), prefix=config.redis_prefix)


_SEALING = (
    "signing_keys_file",
    "signing_keys_command",
    "encryption_keys_file",
    "encryption_keys_command",
)


def open_room(config: Config, backends: Backends, recorder: Recorder) -> Room:
    """Whether savers have room, as ``quota_bytes`` says. Reads nothing before it is asked.

    A folder with an index of this machine is walked, so that payloads whose records expired count,
    and is swept when it is full. Other places are shared: their index has the totals, and their
    operators sweep them.
    """
    if not config.quota_bytes:
        return Unlimited()
    is_ours = config.bulk_url.startswith("file:") and config.index_url.startswith("sqlite:")
    usage = BulkIndex(backends.bulk).usage if is_ours else backends.index.usage
    return Quota(
        TenantUsage(usage, backends.bulk, config.tenant),
        max(1, config.quota_bytes * config.quota_high_percent // 100),
        recorder,
        relief=AutoSweep(backends.index, sweep_settings(config), recorder) if is_ours else None,
    )


def sweep_settings(config: Config) -> dict[str, str]:
    """The variables with which a sweep makes room in this place.

    Its high watermark is the low one: a folder may hold more than its records say, and then records
    below the high watermark have to go, too.
    """
    values: dict[str, object] = {
        "bulk_url": config.bulk_url,
        "index_url": config.index_url,
        "tenant": config.tenant,
        "ttl_s": config.ttl_s,
        "quota_bytes": config.quota_bytes,
        "quota_high_percent": max(1, config.quota_low_percent),
        "quota_low_percent": config.quota_low_percent,
        "sweep_grace_s": config.sweep_grace_s,
        "role": "sweeper",
    }
    # Paths and commands, not keys: without them nothing that is sealed could be given a record.
    sealing = {name: getattr(config, name) for name in _SEALING}
    values |= {name: value for name, value in sealing.items() if value is not None}
    return {ENV_PREFIX + name.upper(): str(value) for name, value in values.items()}
