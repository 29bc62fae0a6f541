"""Real servers for tests and benchmarks: on loopback, without root, gone with the process.

A server that runs in a process of its own is a module here, started with ``cwd=ROOT``.
"""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
"""The repository: from it, ``python -m tests.support.servers.NAME`` finds its module."""
