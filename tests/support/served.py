"""A node agent in this process, at a socket, with what a test's patches and clocks change."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

from objkv.assembly.agent import NodeAgent
from objkv.config import load_config
from objkv.telemetry import MemoryRecorder
from tests.agent.consistency import forget_all
from tests.support.waiting import PATIENCE_S

_ARENA_BYTES = 64 << 20


class ServedAgent:
    """An agent for replicas with these settings, by default over stores of its own, which end with
    it. It serves until ``close``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="objkv-", dir="/tmp"))
        self.path = self.folder / "agent.sock"
        self.url = f"unix://{self.path}"
        """The setting ``agent`` of its replicas."""
        self.recorder = MemoryRecorder()
        own = {
            "bulk_url": f"file://{self.folder}/chunks",
            "index_url": f"sqlite://{self.folder}/index",
            "agent_memory_bytes": _ARENA_BYTES,
        }
        self.config = load_config(own | dict(settings), environ={})
        self.node = NodeAgent(self.config, self.path, self.recorder)
        self.core = self.node.core
        self._ended = Event()
        self._thread = Thread(target=self.node.run, args=(self._ended.wait,), daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Empty the arena, except for what is being read, so that the next load fetches."""
        forget_all(self.core.arena_cache)

    def settle(self) -> None:
        assert self.node.saves.drain(PATIENCE_S)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_S)
        self.node.close()
        shutil.rmtree(self.folder)
