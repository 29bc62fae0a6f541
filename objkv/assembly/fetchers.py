"""Opens the S3 store, alone or with processes that fetch for it. The agent starts those by ``-m``
with this module, and with its settings in the environment; see ``objkv.stores.processes``."""

import os
import sys
from functools import partial
from pathlib import Path

from objkv.config import Config, load_config, parse_url
from objkv.config.node import agent_environment, host_cores
from objkv.stores.base import PruneStore
from objkv.stores.processes import FetchPool, FetchProcess, ProcessStore, run
from objkv.stores.s3.client import open_s3_access
from objkv.stores.s3.store import RANGES_MAX, S3Store
from objkv.telemetry import Recorder

_CORES_EACH = 8
"""Cores for each fetching process: it decrypts on one, and replicas need the others."""
_PROCESSES_MAX = 4


def open_s3(config: Config, *, processes: int = 1) -> S3Store:
    """Open the bucket in one of ``processes``. Sends nothing yet. Raises ``ConfigError``."""
    place = parse_url("bulk_url", config.bulk_url)
    access = open_s3_access(config)
    ranges_max = -(-RANGES_MAX // processes)
    return S3Store(access, config, bucket=place.host, prefix=place.path, ranges_max=ranges_max)


def process_count(store: S3Store) -> int:
    """Return how many processes fetch: 0 without TLS, where one is about as fast as memory."""
    return min(_PROCESSES_MAX, host_cores() // _CORES_EACH) if store.uses_tls else 0


def open_s3_of_agent(config: Config, recorder: Recorder) -> PruneStore:
    """Open the store for an agent, whose large gets processes make. None is started yet."""
    store = open_s3(config)
    processes = process_count(store)
    if not processes:
        return store
    channels = -(-config.load_threads // processes)
    command = [sys.executable, "-P", "-m", "objkv.assembly.fetchers", str(processes)]
    start = partial(FetchProcess, command, _environment(config), channels)
    pool = FetchPool(start, processes, recorder)
    return ProcessStore(store, pool, deadline_s=config.load_deadline_ms / 1000, recorder=recorder)


def _environment(config: Config) -> dict[str, str]:
    """Return the settings as an environment in which this objkv is found, also from source."""
    environ = agent_environment(config)
    places = [str(Path(__file__).parents[2]), environ.get("PYTHONPATH", "")]
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}


if __name__ == "__main__":
    count = int(sys.argv[1])
    run(sys.argv[2:], lambda: open_s3(load_config(), processes=count))
    os._exit(0)  # threads may hang in a get
