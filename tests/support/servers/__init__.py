"""Real servers for tests and benchmarks: on loopback, without root, gone with the process.

``process`` starts those of them that are modules here in processes of their own.
"""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
"""The repository: from it, ``python -m tests.support.servers.NAME`` finds its module."""
