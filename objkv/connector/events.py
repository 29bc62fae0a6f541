"""KV events: what this replica knows to be stored, told to routers in vLLM's words.

A chunk is told once all shards of one of its groups are in the index, or when a load of it
succeeded, as ``BlockStored`` with the hashes that vLLM gives the same blocks on the device; and
taken back, as ``BlockRemoved``, when it turned out to be gone, or when this replica no longer keeps
track of it. Both with a medium of their own, so that they say nothing of the device's blocks. None
of this exists unless vLLM has KV events enabled. Source: vLLM 0.31-0.33,
``distributed/kv_events.py`` and ``v1/core/block_pool.py``. Described in ``docs/kv-events.md``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockStored, KVCacheEvent

from objkv.config import Config
from objkv.connector.block_events import BlockEvents, read_hash_tokens
from objkv.connector.geometry import Geometry
from objkv.connector.guard import guarded
from objkv.connector.metadata import StepPlan, StepReport
from objkv.connector.published import tells_events
from objkv.connector.tracking import Tracked
from objkv.transfer.plan import ChunkMove

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_CHUNKS_MAX = 32_768
"""Told chunks that are kept track of, about 1 KiB each; of more the oldest are taken back."""
_PENDING_MAX = 1_024
"""Chunks being saved, and loads under way, of which each keeps its tokens; of more the oldest are
not told."""

Name = tuple[str, bytes]
"""Namespace and prefix hash of a chunk."""
Find = Callable[[str], Tracked | None]


@dataclass(slots=True)
class _Pending:
    """A chunk that is being saved."""

    events: dict[int, BlockStored] = field(default_factory=dict)
    """By group, of those being saved."""
    shards: set[str] = field(default_factory=set)
    """Fields that are stored."""


@dataclass(slots=True)
class _Told:
    """A chunk that was told."""

    until: float
    hashes: dict[int, list[Any]] = field(default_factory=dict)
    """By group."""


@dataclass(slots=True)
class _Load:
    """A load under way."""

    sync: bool
    events: list[tuple[Name, int, BlockStored | None]]
    """None where nothing new is to be told."""


class NoEvents:
    """Where vLLM does not want any. The scheduler's thread only; never waits, never raises."""

    def planned(self, plan: StepPlan, find: Find) -> None:
        """A step's loads and saves, while their requests, which ``find`` finds, are there."""

    def update(self, output: "KVConnectorOutput") -> None:
        """What all workers told of one step."""

    def reset(self) -> None:
        """Nothing that was told is used by this replica any more."""

    def take(self) -> tuple[KVCacheEvent, ...]:
        """Events since the last call, in the order in which they happened."""
        return ()


class EventLog(NoEvents):
    """Where vLLM wants them."""

    def __init__(
        self,
        geometry: Geometry,
        blocks: BlockEvents,
        *,
        ttl_s: float,
        chunks_max: int = _CHUNKS_MAX,
        pending_max: int = _PENDING_MAX,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            ttl_s: life of a record; what nobody here saved or loaded for so long is taken back.
        """
        self._fields = [geometry.fields(group) for group in range(len(geometry.groups))]
        self._blocks = blocks
        self._ttl_s = ttl_s
        self._chunks_max = chunks_max
        self._pending_max = pending_max
        self._clock = clock
        self._pending: OrderedDict[Name, _Pending] = OrderedDict()
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        self._told: OrderedDict[Name, _Told] = OrderedDict()
        self._events: list[KVCacheEvent] = []

    @guarded(None)
    def planned(self, plan: StepPlan, find: Find) -> None:
        """See ``NoEvents``."""
        for save in plan.saves:
            if (tracked := find(save.request_id)) is None:
                continue
            for move in save.moves:
                self._save_planned(
                    tracked.request, (save.namespace, move.move.prefix_hash), move.move
                )
        for load in plan.loads:
            if (tracked := find(load.request_id)) is None:
                continue
            chunks = {(one.move.chunk, one.move.group): one.move for one in load.moves}.values()
            request = tracked.request
            events = [self._load_planned(request, load.namespace, chunk) for chunk in chunks]
            self._loads[load.request_id] = _Load(load.sync, events)
            _shrink(self._loads, self._pending_max)

    @guarded(None)
    def update(self, output: "KVConnectorOutput") -> None:
        """See ``NoEvents``."""
        if isinstance(report := output.kv_connector_worker_meta, StepReport):
            for request_id in report.failed:
                self._loads.pop(request_id, None)
            for namespace, prefix_hash, shard in report.stored:
                self._shard_stored((namespace, prefix_hash), shard)
            for request_id in report.loaded:
                if (load := self._loads.get(request_id)) is not None and load.sync:
                    self._loaded(request_id)
            self._reject(report.rejected)
        for request_id in output.finished_recving or ():
            self._loaded(request_id)

    @guarded(None)
    def reset(self) -> None:
        """See ``NoEvents``."""
        self._pending.clear()
        self._loads.clear()
        self._take_back(list(self._told))

    @guarded(tuple[KVCacheEvent, ...]())
    def take(self) -> tuple[KVCacheEvent, ...]:
        """See ``NoEvents``."""
        now, overdue = self._clock(), []
        for name, told in self._told.items():  # renewed ones were moved to the end
            if told.until > now:
                break
            overdue.append(name)
        self._take_back(overdue)
        events, self._events = tuple(self._events), []
        return events

    def __repr__(self) -> str:
        return f"<EventLog {len(self._told)} chunks told, {len(self._pending)} being saved>"

    def _save_planned(self, request: "Request", name: Name, move: ChunkMove) -> None:
        if self._is_told(name, move.group) or (event := self._blocks.stored(request, move)) is None:
            return
        self._pending.setdefault(name, _Pending()).events[move.group] = event
        self._pending.move_to_end(name)
        _shrink(self._pending, self._pending_max)

    def _load_planned(
        self, request: "Request", namespace: str, move: ChunkMove
    ) -> tuple[Name, int, BlockStored | None]:
        name = namespace, move.prefix_hash
        known = self._is_told(name, move.group)
        return name, move.group, None if known else self._blocks.stored(request, move)

    def _is_told(self, name: Name, group: int) -> bool:
        return (told := self._told.get(name)) is not None and group in told.hashes

    def _shard_stored(self, name: Name, shard: str) -> None:
        if (pending := self._pending.get(name)) is None:
            return
        pending.shards.add(shard)
        for group, event in list(pending.events.items()):
            if self._fields[group] <= pending.shards:
                del pending.events[group]
                self._tell(name, group, event)
        if not pending.events:
            del self._pending[name]

    def _loaded(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        for name, group, event in load.events if load is not None else ():
            self._tell(name, group, event)

    def _tell(self, name: Name, group: int, event: BlockStored | None) -> None:
        if event is None and not self._is_told(name, group):
            return
        told = self._told.setdefault(name, _Told(0.0))
        told.until = self._clock() + self._ttl_s
        self._told.move_to_end(name)
        if event is not None and group not in told.hashes:
            told.hashes[group] = event.block_hashes
            self._events.append(event)
        if (over := len(self._told) - self._chunks_max) > 0:
            self._take_back(list(self._told)[:over])

    def _reject(self, names: Iterable[Name]) -> None:
        names = list(names)
        for name in names:
            if (pending := self._pending.get(name)) is not None:
                pending.shards.clear()  # what was stored of it is stored anew, or not at all
        self._take_back(names)

    def _take_back(self, names: Iterable[Name]) -> None:
        gone: dict[int, list[Any]] = {}
        for name in names:
            if (told := self._told.pop(name, None)) is not None:
                for group, hashes in told.hashes.items():
                    gone.setdefault(group, []).extend(hashes)
        for group, hashes in gone.items():
            self._events.append(self._blocks.removed(group, hashes))


def open_event_log(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    geometry: Geometry,
    config: Config,
) -> NoEvents:
    """A log that keeps nothing unless vLLM has KV events enabled."""
    if not tells_events(vllm_config):
        return NoEvents()
    hash_tokens = read_hash_tokens(vllm_config, kv_cache_config, geometry)
    return EventLog(geometry, BlockEvents(geometry, hash_tokens), ttl_s=config.ttl_s)


def _shrink(book: OrderedDict[Any, Any], size_max: int) -> None:
    while len(book) > size_max:
        book.popitem(last=False)
