"""Messages between the scheduler's process and the workers', once per step. Plain values."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from objkv.cache.admission import LoadTime
from objkv.transfer.plan import LoadPlan, SavePlan


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A load on which vLLM relies and that cannot be made: the workers report it as failed."""

    request_id: str
    sync: bool
    blocks: frozenset[int] = frozenset()
    """Physical blocks, at least. None between steps: the load failed as a whole."""


@dataclass
class StepPlan(KVConnectorMetadata):
    """From the scheduler to the workers: the loads and saves of this step."""

    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    held: frozenset[str] = frozenset()
    """Finished requests whose blocks are kept until their saves have left the device."""
    idle: bool = False
    """Whether the step computes nothing while loads are in progress."""
    reused: frozenset[str] = frozenset()
    """Requests that this step preempts, whose saves may still read their blocks."""
    may_reuse: bool = True
    """Whether the next step may give blocks of running requests to others."""
    failed_loads: tuple[FailedLoad, ...] = ()


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: failures, and the durations of successful loads."""

    dropped: set[tuple[str, int]] = field(default_factory=set)
    """(request id, chunk) of each dropped save."""
    rejected: set[tuple[str, bytes]] = field(default_factory=set)
    """(namespace, prefix hash) of records whose payload was missing or corrupt."""
    failed: set[str] = field(default_factory=set)
    """Ids of requests whose load failed in whole or in part."""
    loaded: dict[str, LoadTime] = field(default_factory=dict)
    """Durations of successful loads, by request id."""
    stored: set[tuple[str, bytes, str]] = field(default_factory=set)
    """(namespace, prefix hash, field) of payloads that the agent saves, if events are enabled."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Failures add up, and a load took as long as on the slowest worker."""
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
