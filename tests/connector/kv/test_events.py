"""KV events: what a router that believes them takes to be stored is stored."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from objkv.cache.admission import LoadTime
from objkv.config import Config
from objkv.connector.kv import events
from objkv.connector.kv.events import EventLog
from objkv.connector.kv.loads import PromisedLoads
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord
from objkv.keys.chunk import field_of
from objkv.keys.identity import GroupIdentity
from objkv.transfer.plan import ChunkMove, LoadPlan, SaveMove, SavePlan
from tests.contracts.clock import ManualClock
from tests.support.plans import LoadMove, packed

NAMESPACE = "0" * 32
CHUNK = 64
FULL = GroupIdentity("full", None, ("a", "b", "c", "d"), heads=4, content=8, block_size=16)
WINDOW = GroupIdentity("sliding_window", 32, ("e", "f"), heads=2, content=8, block_size=32)
RECORD = ShardRecord(10, 10, True, False, "0" * 32, 1)


@pytest.mark.parametrize("wanted", [None, False, True])
def test_a_log_is_opened_only_where_vllm_wants_events(
    wanted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "read_hash_tokens", lambda *_: 16)
    told = None if wanted is None else KVEventsConfig(wanted, publisher="null")
    given: Any = SimpleNamespace(kv_events_config=told)
    nothing: Any = None
    log = events.open_event_log(given, nothing, ONE, Config(bulk_url="file:///b"))
    assert (log is None) is (not wanted)


def request(name: str = "r", tokens: int = 4 * CHUNK + 3, unit: int = 16, **more: Any) -> Request:
    ids = random.Random(len(name) + tokens).choices(range(1000), k=tokens)
    kv_cache_utils.init_none_hash(sha256)
    return Request(
        name,
        ids,
        SamplingParams(),
        None,
        block_hasher=kv_cache_utils.get_request_block_hasher(unit, sha256),
        **more,
    )


def prefix_hash(chunk: int) -> bytes:
    return chunk.to_bytes(20, "big")


def move(chunk: int, group: int) -> ChunkMove:
    tokens = chunk * CHUNK, (chunk + 1) * CHUNK
    return ChunkMove(chunk, group, prefix_hash(chunk), bytes(20), *tokens, 0, (1,))


def shown(request: Request) -> list[Any]:
    """Its block hashes as events show them."""
    return [kv_cache_utils.maybe_convert_block_hash(one) for one in request.block_hashes]


class World:
    """A log, and a router that believes it."""

    def __init__(self, geometry: Geometry, unit: int = 16) -> None:
        self.geometry, self.clock = geometry, ManualClock()
        self.log = EventLog(geometry, unit, clock=self.clock, ttl_s=60)
        self.request = request(unit=unit)
        self.loads = PromisedLoads(16, 1.0)
        self.believed: set[tuple[int, Any]] = set()

    def _find(self, request_id: str) -> Any:
        tracked = type("TrackedRequest", (), {"request": self.request})
        return tracked if request_id == self.request.request_id else None

    def save(self, *chunks: int) -> None:
        groups = range(len(self.geometry.groups))
        moves = [SaveMove(move(chunk, group), "", None) for chunk in chunks for group in groups]
        plan = SavePlan(self.request.request_id, NAMESPACE, tuple(moves))
        self.log.planned(StepPlan(saves=(plan,)), self._find)

    def load(self, *chunks: int, sync: bool = False) -> None:
        groups = range(len(self.geometry.groups))
        moves = [move(chunk, group) for chunk in chunks for group in groups]
        loads = packed(LoadMove(one, None) for one in moves)
        plan = LoadPlan(self.request.request_id, NAMESPACE, loads, sync)
        self.loads.plan(plan, CHUNK, [RECORD] * len(moves))
        self.log.planned(StepPlan(*self.loads.send()), self._find)

    def report(self, received: set[str] | None = None, **told: Any) -> None:
        """The workers told something; all of it is in one step."""
        report = StepReport(**told)
        ended = self.loads.ended(report, received or ())
        self.log.update(report, [load.plan.request_id for load in ended])

    def stored(self, chunk: int, *fields: str) -> None:
        self.report(stored={(NAMESPACE, prefix_hash(chunk), field) for field in fields})

    def save_whole(self, *chunks: int) -> None:
        self.save(*chunks)
        for chunk in chunks:
            self.stored(chunk, "0")

    def listen(self) -> list[Any]:
        """What the log tells now; the router believes it."""
        events = list(self.log.take_events())
        for event in events:
            assert event.medium == MEDIUM_STORAGE
            blocks = {(event.group_idx, one) for one in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not blocks & self.believed
                self.believed |= blocks
            else:
                assert blocks <= self.believed
                self.believed -= blocks
        return events

    def blocks(self, chunk: int, group: int) -> set[tuple[int, Any]]:
        identity, known = self.geometry.groups[group], shown(self.request)
        size = identity.block_size
        start = chunk * CHUNK if identity.window is None else (chunk + 1) * CHUNK - identity.window
        ends = range(start + size, (chunk + 1) * CHUNK + 1, size)
        return {(group, known[end // 16 - 1]) for end in ends}


ONE = Geometry((FULL,), CHUNK, 16, tp_size=1)
JOINED = [
    ONE,
    Geometry((FULL,), CHUNK, 16, tp_size=2),
    Geometry((FULL,), CHUNK, 16, tp_size=8),
    Geometry((FULL,), CHUNK, 16, tp_size=2, stages=((3, 1),)),
    Geometry((FULL, WINDOW), CHUNK, 32, tp_size=1),
    Geometry((FULL, WINDOW), CHUNK, 32, tp_size=4),
    Geometry((FULL, WINDOW), CHUNK, 32, tp_size=2, stages=((2, 2), (1, 1))),
]
IN_PARTS = [replace(one, nodes=2) for one in JOINED if one.ranks > 1]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("salt", [None, "s"])
def test_a_chunk_is_told_as_vllm_tells_the_same_blocks_on_the_device(
    *, lora: bool, salt: str | None
) -> None:
    adapter = LoRARequest("ada", 3, "/some/where") if lora else None
    world = World(ONE)
    world.request = request(cache_salt=salt, lora_request=adapter)
    world.save_whole(0, 1)
    mine = world.listen()
    pool = BlockPool(16, True, 16, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(8)
    for first in (0, 4):
        pool.cache_full_blocks(world.request, blocks, first, first + 4, 16, 0)
    theirs = pool.take_events()
    for event in theirs:
        event.medium, event.locality, event.ownership = MEDIUM_STORAGE, "REMOTE", "objkv"
        event.session_id = None
    assert mine == theirs
    assert mine[1].parent_block_hash == mine[0].block_hashes[-1]


@pytest.mark.parametrize("geometry", JOINED + IN_PARTS)
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_a_group_is_told_once_all_its_payloads_are_stored_in_whatever_order(
    geometry: Geometry, data: st.DataObject
) -> None:
    """Against every rank of every shape: who holds what, and who writes it. Also if the ranks are
    not on the nodes that the scheduler assumes."""
    world = World(geometry)
    placed = replace(geometry, nodes=data.draw(st.sampled_from((geometry.nodes, geometry.ranks))))
    world.save(0, 1)
    left: dict[tuple[int, int], set[str]] = {}
    reports = set[tuple[int, int, str]]()
    for chunk in (0, 1):
        for group in range(len(geometry.groups)):
            for rank in range(geometry.ranks):
                share = geometry.topology(group).held(rank)
                if share is not None and share.writes(prefix_hash(chunk)):
                    field = field_of(group, placed.joined(group, rank)[0])
                    left.setdefault((chunk, group), set()).add(field)
                    reports.add((chunk, group, field))
    for chunk, group, field in data.draw(st.permutations(sorted(reports))):
        world.stored(chunk, field)
        left[chunk, group].discard(field)
        world.listen()
        expected = set[tuple[int, Any]]()
        for (done, of), fields in left.items():
            expected |= set() if fields else world.blocks(done, of)
        assert world.believed == expected
    assert not any(left.values())


ACTIONS = ("save", "store", "reject", "load", "fail", "reset", "wait")
steps = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.booleans())


@patch.multiple(events, _CHUNKS_MAX=3, _PENDING_MAX=2)
@given(st.lists(steps, max_size=40))
@settings(deadline=None, max_examples=150)
def test_a_router_never_believes_more_than_is_stored(steps: list[tuple[str, int, bool]]) -> None:
    geometry = IN_PARTS[0]
    fields = sorted(geometry.fields(0))
    world = World(geometry)
    there: dict[int, set[str]] = {chunk: set() for chunk in range(4)}
    for action, chunk, sync in steps:
        if action == "save":
            world.save(chunk)
        elif action == "store":
            lacking = sorted(set(fields) - there[chunk]) or fields
            there[chunk].add(lacking[0])
            world.stored(chunk, lacking[0])
        elif action == "reject":
            there[chunk].clear()
            world.report(rejected={(NAMESPACE, prefix_hash(chunk))})
        elif action == "load" and len(there[chunk]) == 2:
            world.load(chunk)
            world.report({"r"}, loaded={"r": LoadTime(1.0, 0.5)})
        elif action == "fail":
            world.load(chunk, sync=sync)
            world.report(failed={"r"}, loaded={"r": LoadTime(1.0, 0.5)})  # on another rank
            world.report({"r"})
        elif action == "reset":
            world.log.reset()
            there = {chunk: set() for chunk in range(4)}
        elif action == "wait":
            world.clock.advance(25)
        world.listen()
        stored = [chunk for chunk, held in there.items() if len(held) == 2]
        assert world.believed <= {block for chunk in stored for block in world.blocks(chunk, 0)}
        assert len(world.believed) <= 3 * 4


def test_what_was_loaded_is_told_once_it_is_there() -> None:
    world = World(JOINED[4])
    world.load(0, 1)
    world.report(loaded={"r": LoadTime(1.0, 0.5)})  # one of several workers, perhaps
    assert not world.listen()
    world.report({"r"})
    assert len(world.listen()) == 4
    world.load(0, 1)
    world.report({"r"})
    assert not world.listen()


def test_what_nobody_here_used_for_as_long_as_a_record_lives_is_taken_back() -> None:
    world = World(ONE)
    world.save_whole(0, 1)
    world.listen()
    world.clock.advance(40)
    world.load(0)
    world.report({"r"})
    assert not world.listen()
    world.clock.advance(40)
    world.listen()
    assert world.believed == world.blocks(0, 0)


@pytest.mark.parametrize(
    ("unit", "asked"), [(16, request(tokens=CHUNK - 1)), (32, request(unit=16))]
)
def test_hashes_that_vllm_has_not_made_or_of_other_blocks_are_not_told(
    unit: int, asked: Request
) -> None:
    world = World(ONE, unit=unit)
    world.request = asked
    world.save_whole(0)
    assert not world.listen()
