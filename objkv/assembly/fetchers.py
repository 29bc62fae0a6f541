"""Opens the S3 store, alone or with processes that fetch for it. The agent starts those by ``-m``
with this module, and with its settings in the environment; see ``objkv.stores.processes``."""

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Final

from objkv.config import Config, load_config, parse_url
from objkv.config.node import agent_environment, host_cores
from objkv.stores.base import PruneStore
from objkv.stores.processes.child import run
from objkv.stores.processes.pool import FetchPool, PoolLimits
from objkv.stores.processes.process import FetchProcess
from objkv.stores.processes.store import ProcessGets
from objkv.stores.s3.client import open_s3_access
from objkv.stores.s3.demands import PutDemands
from objkv.stores.s3.store import S3Store
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
_CORES_EACH = 8
"""Cores for each fetching process: it decrypts on one, and replicas need the others."""
_PROCESSES_MAX = 4
RANGES_MAX: Final = 56
"""Threads of an agent that help with large payloads. With ``load_threads`` 8 they have 64
connections, of which S3 gives each about 85 MB/s; more gain nothing (``docs/scaling.md``)."""
HEDGE_PERCENT_MAX: Final = 5
"""Requests above the 95th percentile are hedged: that share of all, unless the store slows down for
all, which hedges would make worse."""


def open_s3(config: Config, recorder: Recorder, *, processes: int = 1) -> S3Store:
    """Open the store of ``bulk_url``, a bucket, in one of so many processes of an agent. Sends
    nothing yet. Raises ``ConfigError``."""
    place = parse_url("bulk_url", config.bulk_url)
    return S3Store(
        open_s3_access(config),
        bucket=place.host,
        prefix=place.path,
        ranges_max=-(-RANGES_MAX // processes),
        hedge_percent_max=HEDGE_PERCENT_MAX,
        deadline_s=config.load_deadline_ms / 1000,
        demands=PutDemands.of(config),
        recorder=recorder,
    )


def process_count(store: S3Store) -> int:
    """Return how many processes an agent fetches with. Without TLS none are needed: one process
    moves plain bytes about as fast as memory."""
    return min(_PROCESSES_MAX, host_cores() // _CORES_EACH) if store.uses_tls else 0


def open_s3_of_agent(config: Config, recorder: Recorder) -> PruneStore:
    """Open the store for an agent, whose large gets processes make. None is started yet."""
    store = open_s3(config, recorder)
    processes = process_count(store)
    if not processes:
        return store
    lanes = -(-config.load_threads // processes)
    command = [sys.executable, "-P", "-m", "objkv.assembly.fetchers", str(processes)]
    start = partial(FetchProcess, command, _environment(config))
    pool = FetchPool(start, PoolLimits(processes, lanes), recorder, report=_log_loss)
    return ProcessGets(store, pool, deadline_s=config.load_deadline_ms / 1000, recorder=recorder)


def _log_loss(pid: int, reason: object) -> None:
    if pid:
        logger.warning("fetching process lost pid=%d reason=%s", pid, reason)
    else:
        logger.warning("no fetching process, the agent fetches without it reason=%s", reason)


def _environment(config: Config) -> dict[str, str]:
    """Return the settings as an environment in which this objkv is found, also if it was started
    from its source folder."""
    environ = agent_environment(config)
    places = [str(Path(__file__).parents[2]), environ.get("PYTHONPATH", "")]
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}


if __name__ == "__main__":
    count = int(sys.argv[1])
    run(sys.argv[2:], lambda recorder: open_s3(load_config(), recorder, processes=count))
    os._exit(0)  # threads may hang in a get
