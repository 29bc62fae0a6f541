"""What a request's records come to, and what is asked to find out."""

from types import SimpleNamespace
from typing import Any, cast

from objkv.connector.kv.coverage import Coverage
from objkv.connector.kv.requests import TrackedRequest
from objkv.connector.kv.scheduler import Matching, SyncGate
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord
from objkv.keys.identity import GroupIdentity

GROUP = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=32)
RECORDS = ({"0.L0-1_H0-1": ShardRecord(9, 9, "none", False, "0" * 32, 1)},) * 2


class World:
    """Three requests that wait; notes how often they are counted, and what is admitted for."""

    def __init__(self) -> None:
        self.counted = 0
        self.behind: list[int] = []
        geometry = Geometry((GROUP,), 32, 32, tp_size=1)
        self.coverage = Coverage(geometry)
        self.matching = Matching(
            "async", geometry, SyncGate(5.0), cast("Any", self), cast("Any", self)
        )

    def waiting(self) -> int:
        self.counted += 1
        return 3

    def admit(self, records: Any, computed: int, end: int, *, waiting: int) -> int:
        self.behind.append(waiting)
        return end

    def match(self, computed: int = 0) -> int:
        request: Any = SimpleNamespace(num_tokens=70)
        return self.matching.usable(TrackedRequest(request, "n" * 32), RECORDS, computed).end


def test_who_waits_is_counted_once_a_step_and_without_the_request_itself() -> None:
    """Counting takes as long as matching, and all that wait may be matched in one step."""
    world = World()
    assert [world.match(), world.match(), world.match()] == [64, 64, 64]
    assert (world.counted, world.behind) == (1, [2, 2, 2])
    world.matching.next_step()
    world.match()
    assert world.counted == 2
