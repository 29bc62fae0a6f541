"""The scheduler's side of an engine without a KV cache to share, such as one that only encodes
images: it matches, loads and saves nothing."""

from typing import TYPE_CHECKING

from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.planning import BlockTable

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class NothingShared:
    """See ``SchedulerSide`` for its methods."""

    holds_blocks = False
    requests_under_way: tuple[str, ...] = ()
    tables_ended: tuple[tuple[int, ...], ...] = ()

    def track(self, request: "Request") -> None:
        """Do nothing."""

    def match(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Return that nothing can be loaded."""
        return 0, False

    def plan_load(self, request: "Request", blocks: BlockTable, tokens: int) -> None:
        """Do nothing."""

    def plan_step(self, output: "SchedulerOutput") -> StepPlan:
        """Return an empty plan."""
        return StepPlan()

    def end_step(self) -> "tuple[KVCacheEvent, ...]":
        """Return no events."""
        return ()

    def update(self, output: "KVConnectorOutput") -> "list[Request]":
        """Return no failed request."""
        return []

    def finish(self, request: "Request", blocks: BlockTable) -> bool:
        """Return that no block must be kept."""
        return False

    def reset(self, *, clean: bool) -> bool:
        """Return that nothing stored so far is used."""
        return True

    def close(self) -> None:
        """Do nothing."""
