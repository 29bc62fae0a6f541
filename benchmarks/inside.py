"""Loads of a worker without a node agent, as benchmarks open them."""

from collections.abc import Mapping
from typing import Final

from objkv.agent.connections import InsideAgent

from objkv.agent.core import CoreLimits
from objkv.cache.chunks import ChunkCache
from objkv.telemetry import Recorder
from objkv.transfer.loading.arena_lane import ArenaLane
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.paging import PagedGroup

PAGE: Final = 4096


class InsideLoads:
    """A loader over a core of its own, into a paged cache on the host."""

    def __init__(
        self,
        cache: ChunkCache,
        groups: Mapping[int, PagedGroup],
        recorder: Recorder,
        *,
        payloads: int,
        payload_bytes: int,
        threads: int,
        limits: LoadLimits,
    ) -> None:
        """The arena has room for so many ``payloads`` of at most ``payload_bytes``. The caller
        closes ``loader``."""
        nbytes = payloads * (-(-payload_bytes // PAGE) + 1) * PAGE
        core = CoreLimits(threads, limits.queue_max, is_paced=True, waits_for_room=True)
        self.inside = InsideAgent(cache, nbytes, core, recorder)
        self.loader = Loader(
            groups,
            ArenaLane(),
            self.inside.connect,
            limits=limits,
            recorder=recorder,
            inside=self.inside,
        )

    @property
    def leased(self) -> int:
        """How many payloads a load or a fetch holds."""
        return self.inside.core.residents.leased()

    def forget(self) -> None:
        """Empty the arena, so that the next load fetches."""
        residents = self.inside.core.residents
        for key in list(residents._by_key):
            residents.forget(key)

    def __repr__(self) -> str:
        return f"<InsideLoads {self.inside!r}>"
