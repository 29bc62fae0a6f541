"""Whether the forward pass may wait for the store: not after it waited in vain.

A load within the step that is never answered holds up every request of the replica until its
deadline. A breaker alone does not help: it lets a call through again every few seconds, and the
model would wait for each. A load between steps holds up its own request only, so the next loads are
of that kind until one succeeds.
"""

from collections.abc import Iterable

from objkv.connector.metadata import StepReport
from objkv.transfer.plan import LoadPlan


class Confidence:
    """The scheduler's thread only."""

    def __init__(self) -> None:
        self._within: frozenset[str] = frozenset()
        self.holds = True
        """Whether loads within the step may be planned."""

    def planned(self, loads: Iterable[LoadPlan]) -> None:
        """A step was planned, with these loads."""
        self._within = frozenset(load.request_id for load in loads if load.sync)

    def reported(self, report: StepReport) -> None:
        """What workers told of it. A payload that was refused, or gone, was an answer."""
        if not report.rejected and self._within & report.failed:
            self.holds = False

    def loaded(self) -> None:
        """A load between steps succeeded."""
        self.holds = True
