"""Opens the S3 store, alone or with processes that fetch for it. The agent starts those by ``-m``
with this module, and with its settings in the environment; see ``objkv.stores.processes``."""

import os
import sys
from functools import partial
from pathlib import Path

from objkv.config import Config, load_config, parse_url
from objkv.config.node import agent_environment, host_cores
from objkv.stores.base import PruneStore
from objkv.stores.processes import FetchPool, FetchProcess, ProcessGets, run
from objkv.stores.s3.client import open_s3_access
from objkv.stores.s3.store import S3Store
from objkv.telemetry import Recorder

_CORES_EACH = 8
_AUTO_MAX = 4


def open_s3(config: Config, recorder: Recorder) -> S3Store:
    """Open the store of ``bulk_url``, a bucket. Sends nothing yet. Raises ``ConfigError``."""
    place = parse_url("bulk_url", config.bulk_url)
    access = open_s3_access(config)
    return S3Store(access, config, recorder, bucket=place.host, prefix=place.path)


def process_count(config: Config, store: S3Store) -> int:
    """Return how many processes an agent of these settings fetches with. Without TLS none are
    needed: one process moves plain bytes about as fast as memory."""
    if config.agent_fetch_processes != "auto":
        return config.agent_fetch_processes
    return min(_AUTO_MAX, host_cores() // _CORES_EACH) if store.uses_tls else 0


def open_s3_of_agent(config: Config, recorder: Recorder) -> PruneStore:
    """Open the store for an agent, whose large gets processes make. None is started yet."""
    store = open_s3(config, recorder)
    processes = process_count(config, store)
    if not processes:
        return store
    lanes = -(-config.load_threads // processes)
    ranges = -(-config.s3_ranges_max // processes)
    command = [sys.executable, "-P", "-m", "objkv.assembly.fetchers"]
    environ = _environment(config.model_copy(update={"s3_ranges_max": ranges}))
    start = partial(FetchProcess, command, environ, lanes)
    pool = FetchPool(start, processes, recorder)
    return ProcessGets(store, pool, deadline_s=config.load_deadline_ms / 1000, recorder=recorder)


def _environment(config: Config) -> dict[str, str]:
    """Return the settings as an environment in which this objkv is found, also if it was started
    from its source folder."""
    environ = agent_environment(config)
    places = [str(Path(__file__).parents[2]), environ.get("PYTHONPATH", "")]
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}


if __name__ == "__main__":
    run(sys.argv[1:], lambda recorder: open_s3(load_config(), recorder))
    os._exit(0)  # threads may hang in a get
