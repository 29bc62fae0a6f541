"""A fetching process of a node agent. The agent starts it by ``-m``, with its settings in the
environment; see ``objkv.stores.processes``."""

import os
import sys

from objkv.assembly.fetchers import open_s3
from objkv.config import load_config
from objkv.stores.base import ReadStore
from objkv.stores.processes.child import run
from objkv.telemetry import Recorder


def open_store(recorder: Recorder) -> ReadStore:
    """Open the bulk store of the settings."""
    return open_s3(load_config(), recorder)


if __name__ == "__main__":
    run(sys.argv[1:], open_store)
    os._exit(0)  # threads may hang in a get
