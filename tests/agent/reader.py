"""A replica that loads by an agent. It needs torch, which most tests of agents do without."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from objkv.agent.client import AgentConnection
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.loader import Loader, LoadLimits
from tests.agent.world import PATIENCE_S
from tests.support.paged_cache import BLOCKS, Replica, same_blocks

CHUNKS = 4


def load_by_agent(
    replica: Replica,
    connect: Callable[[], AgentConnection],
    lane: Lane | None = None,
    *,
    verify: bool = False,
    **limits: Any,
) -> Loader:
    replica.loader.close()
    bounds = LoadLimits(64, PATIENCE_S, PATIENCE_S, join_s=PATIENCE_S)
    loader = replica.loader = Loader(  # type: ignore[assignment]
        {0: replica.paged},
        lane or Lane(),
        connect,
        verify=verify,
        limits=replace(bounds, **limits),
        recorder=replica.recorder,
    )
    return loader


class Reader:
    """A replica that loads by whichever agent is there, what another one has saved."""

    def __init__(self, store: Any, index: Any, path: Path) -> None:
        self.writer = Replica(store, index, seed=1)
        self.writer.save(range(CHUNKS))
        self.replica = Replica(store, index, seed=2)
        self.loader = load_by_agent(
            self.replica, lambda: AgentConnection(path, wants_arena=True, call_s=PATIENCE_S)
        )

    def can_load(self) -> bool:
        for cache in self.replica.caches:
            cache.zero_()
        if self.replica.load(range(CHUNKS), 1).failed_blocks:
            return False
        blocks = range(1, 1 + CHUNKS * BLOCKS)
        assert same_blocks(self.writer.caches, blocks, self.replica.caches, blocks)
        return True

    def close(self) -> None:
        self.replica.close()
        self.writer.close()
