"""Tells savers whether there is room, as the settings say."""

from objkv.assembly.backends import Backends
from objkv.cache.bulk_index import BulkIndex
from objkv.cache.quota import Quota, Room, TenantUsage, Unlimited
from objkv.config import Config
from objkv.config.sources import ENV_PREFIX
from objkv.ops.relief import Relief
from objkv.telemetry import Recorder

_SEALING = (
    "signing_keys_file",
    "signing_keys_command",
    "encryption_keys_file",
    "encryption_keys_command",
)


def open_room(config: Config, backends: Backends, recorder: Recorder) -> Room:
    """What stands between savers and a full place. It asks nothing before it is asked.

    A folder with an index of this machine is walked, so that what has expired in the index and lies
    there still counts, and is swept when it is full; whatever else is shared tells by its index,
    and is swept by its operators.
    """
    if not config.quota_bytes:
        return Unlimited()
    is_ours = config.bulk_url.startswith("file:") and config.index_url.startswith("sqlite:")
    usage = BulkIndex(backends.bulk).usage if is_ours else backends.index.usage
    return Quota(
        TenantUsage(usage, backends.bulk, config.tenant),
        max(1, config.quota_bytes * config.quota_high_percent // 100),
        recorder,
        relief=Relief(backends.index, sweep_settings(config), recorder) if is_ours else None,
    )


def sweep_settings(config: Config) -> dict[str, str]:
    """The variables with which a sweep makes room in this place.

    It begins where it is to end: what makes a folder full may be more than its records tell, and
    then records below the high watermark have to go, too.
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
