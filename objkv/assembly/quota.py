"""Tells savers whether there is room, as the settings say."""

from objkv.assembly.backends import Backends
from objkv.cache.bulk_index import BulkIndex
from objkv.cache.quota import Quota, Room, TenantUsage, Unlimited
from objkv.config import Config
from objkv.telemetry import Recorder


def open_room(config: Config, backends: Backends, recorder: Recorder) -> Room:
    """What stands between savers and a full place. It asks nothing before it is asked.

    A folder with an index of this machine is walked, so that what has expired in the index and lies
    there still counts; whatever else is shared tells by its index.
    """
    if not config.quota_bytes:
        return Unlimited()
    is_ours = config.bulk_url.startswith("file:") and config.index_url.startswith("sqlite:")
    usage = BulkIndex(backends.bulk).usage if is_ours else backends.index.usage
    used = TenantUsage(usage, backends.bulk, config.tenant)
    return Quota(used, config.quota_bytes * config.quota_high_percent // 100, recorder)
