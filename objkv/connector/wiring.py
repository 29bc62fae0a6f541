"""Opens what every connector needs from its settings: stores, a cache, a name. Imports no vLLM."""

import os
import socket
from urllib.parse import urlsplit

from objkv.assembly.backends import Backends, check_backends, open_backends, open_room
from objkv.assembly.seal import open_seal
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.errors import ConfigError
from objkv.telemetry import Recorder

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def writer_name(connector: object) -> str:
    """Names a connector of this process in leases and payloads."""
    return f"{socket.gethostname()}:{os.getpid()}:{id(connector):x}"


def open_checked_backends(config: Config, recorder: Recorder) -> Backends:
    """The stores and the index, after one round trip to each; see ``check_backends``."""
    backends = open_backends(config, recorder)
    check_backends(backends, config)
    return backends


def open_cache(
    config: Config, backends: Backends, writer: str, recorder: Recorder, *, read_once: bool = False
) -> ChunkCache:
    """Payloads by key. Reads the keys that payloads are sealed with; raises ``ConfigError``.

    Args:
        writer: names this process in leases.
        read_once: payloads are read once, as a rule: none is promoted, and there is no quota.
    """
    settings = CacheSettings(
        writer,
        config.ttl_s,
        config.lease_ms,
        config.hot_payload_bytes_max,
        config.hot_save_bytes_max,
        config.hot_promote_loads,
        0 if read_once else config.hot_promote_bytes_max,
    )
    return ChunkCache(
        backends.bulk,
        backends.hot,
        backends.index,
        settings,
        recorder,
        room=None if read_once else open_room(config, backends, recorder),
        seal=open_seal(config),
    )


def may_save(config: Config, *, producer: bool, consumer: bool) -> bool:
    """Whether this replica stores anything; with the rights of a reader it does not try.

    Args:
        producer: whether vLLM's configuration has it save (``kv_role``, ``ec_role``).
        consumer: whether it has it load.

    Raises ``ConfigError`` for a replica that would then do nothing at all.
    """
    if config.role != "reader":
        return producer
    if producer and not consumer:
        raise ConfigError(
            "role is reader, and vLLM's role of this replica is that of a producer, which only "
            "saves: set role to writer, or let the replica load"
        )
    return False


def is_far(config: Config) -> bool:
    """Whether payloads cross a network, where compressing them may pay. A directory counts as near:
    its disk makes puts slow, not loads, which mostly come from memory."""
    host = urlsplit(config.s3_endpoint_url or "").hostname
    return config.bulk_url.startswith("s3:") and host not in _THIS_MACHINE
