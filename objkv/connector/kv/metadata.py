"""What crosses between the scheduler's process and the workers', once per step. Plain values."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from objkv.cache.admission import LoadTime
from objkv.transfer.plan import LoadPlan, SavePlan

StoredShard = tuple[str, bytes, str]
"""Namespace and prefix hash of a chunk, and the field of a shard that is in the index now."""


@dataclass
class StepPlan(KVConnectorMetadata):
    """Scheduler → workers: what to load and save in this step."""

    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    held: frozenset[str] = frozenset()
    """Finished requests whose blocks are kept until their saves have left the device."""
    idle: bool = False
    """Whether there is nothing to compute, and loads to wait for."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers → scheduler: what did not go as planned, and how long the rest took."""

    dropped: set[tuple[str, int]] = field(default_factory=set)
    """(request id, chunk) whose save was dropped."""
    rejected: set[tuple[str, bytes]] = field(default_factory=set)
    """(namespace, prefix hash) of records that promised what was not there, or not right."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load failed, wholly or in part."""
    loaded: dict[str, LoadTime] = field(default_factory=dict)
    """By request id, loads that succeeded."""
    stored: set[StoredShard] = field(default_factory=set)
    """Shards that were announced; reported only where vLLM has KV events enabled."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """What went wrong on one worker went wrong; a load took as long as on the slowest."""
        assert isinstance(other, StepReport)
        return StepReport(
            self.dropped | other.dropped,
            self.rejected | other.rejected,
            self.failed | other.failed,
            self.loaded
            | {
                name: max(load, self.loaded.get(name, load), key=lambda one: one.seconds)
                for name, load in other.loaded.items()
            },
            self.stored | other.stored,
        )

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any((self.dropped, self.rejected, self.failed, self.loaded, self.stored))
