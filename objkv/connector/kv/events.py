"""KV events: what this replica knows to be stored, reported to routers in vLLM's words.

A chunk is reported once all shards of one of its groups are in the index, or when a load of it
succeeded, as ``BlockStored`` with the hashes that vLLM gives the same blocks on the device; and
taken back, as ``BlockRemoved``, when it turned out to be gone, or when this replica no longer keeps
track of it. Both with a medium of their own, so that they say nothing of the device's blocks. None
of this exists unless vLLM has KV events enabled. Source: vLLM 0.31-0.33,
``distributed/kv_events.py`` and ``v1/core/block_pool.py``. Described in ``docs/kv-events.md``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from objkv.assembly.backends import Backends
from objkv.cache.match import stored_blocks
from objkv.config import Config
from objkv.connector.guard import guarded
from objkv.connector.kv.metadata import StepPlan, StepReport, StoredShard
from objkv.connector.kv.requests import TrackedRequest
from objkv.connector.model.groups import Geometry
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.index.guarded import GuardedIndex
from objkv.transfer.plan import ChunkMove

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


MEDIUM = "OBJKV"
"""Of all events: reachable by this replica, in stores that it shares with others."""


class BlockEvents:
    """Makes the events of a chunk of one group: its blocks, by vLLM's own hashes. Pure.

    Field by field they are those of the same blocks on the device, but for the medium. Source: vLLM
    0.31-0.33, ``cache_full_blocks`` in ``v1/core/block_pool.py``, ``resolve_block_hashes`` in
    ``v1/core/kv_cache_utils.py``.
    """

    def __init__(self, geometry: Geometry, hash_tokens: int) -> None:
        """``hash_tokens``: of one of vLLM's block hashes; blocks of all groups are multiples."""
        self._geometry = geometry
        self._hash_tokens = hash_tokens

    def stored(self, request: "Request", move: ChunkMove) -> BlockStored | None:
        """Reports that the chunk's payloads are stored; None where vLLM's hashes of the blocks
        in them are not known."""
        identity, unit = self._geometry.groups[move.group], self._hash_tokens
        size, end = identity.block_size, move.token_end
        start = end - stored_blocks(identity, self._geometry.chunk_tokens) * size
        known = request.block_hashes
        # One hash per unit of tokens, less what a drafter still has to look at.
        if start >= end or end // unit > len(known) or len(known) > request.num_tokens // unit:
            return None
        convert = kv_cache_utils.maybe_convert_block_hash
        hashes = [convert(known[at // unit - 1]) for at in range(start + size, end + 1, size)]
        lora = request.lora_request
        return _made(
            BlockStored,
            block_hashes=hashes,
            parent_block_hash=convert(known[start // unit - 1]) if start else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=size,
            lora_id=None if lora is None else lora.adapter_id,
            medium=MEDIUM,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(request, start, end, size),
            group_idx=move.group,
        )

    def removed(self, group: int, hashes: list[Any]) -> BlockRemoved:
        """Takes blocks of a group back, by the hashes that were reported."""
        return _made(BlockRemoved, block_hashes=hashes, medium=MEDIUM, group_idx=group)


def read_hash_tokens(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", geometry: Geometry
) -> int:
    """How many tokens one of vLLM's block hashes is of."""
    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    if resolve is None:  # not every version has it
        unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
        return unit or gcd(*(group.block_size for group in geometry.groups))
    return int(resolve(kv_cache_config, vllm_config)[1])


def _extra_keys(request: "Request", start: int, end: int, size: int) -> Any:
    keys = []
    media = 0
    for begin in range(start, end, size):
        mine, media = kv_cache_utils.generate_block_hash_extra_keys(
            request, begin, begin + size, media
        )
        keys.append(mine)
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return keys if convert is None else convert(keys)


def _made(kind: type[Any], **values: Any) -> Any:
    """An event with those of the fields that this vLLM knows."""
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in values.items() if name in known})


_SHARDS_MAX = 65_536
"""Kept until the next report; more are not reported."""


class PublishedIndex(GuardedIndex):
    """Keeps which shards this process announced, until ``take``. Safe from many threads.

    At the index, where a save ends: a payload that could not be announced is found by no replica,
    and one that another replica had put before is announced all the same.
    """

    def __init__(self, inner: WriteIndex) -> None:
        super().__init__(inner)
        self._lock = Lock()
        self._published: set[StoredShard] = set()

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        """As the inner index; kept only if it worked."""
        self._inner.publish(chunk, shards, ttl_s=ttl_s)
        names = {(chunk.namespace, chunk.prefix_hash, name) for name in shards}
        with self._lock:
            if len(self._published) < _SHARDS_MAX:
                self._published |= names

    def take(self) -> set[StoredShard]:
        """What was announced since the last call."""
        with self._lock:
            published, self._published = self._published, set()
        return published


def watch_saves(
    backends: Backends, vllm_config: "VllmConfig"
) -> tuple[Backends, PublishedIndex | None]:
    """The backends, and the index that records announcements, if vLLM has KV events enabled."""
    if not events_enabled(vllm_config):
        return backends, None
    index = PublishedIndex(backends.index)
    return replace(backends, index=index), index


def with_stored(report: StepReport | None, published: PublishedIndex | None) -> StepReport | None:
    """A worker's report, with what it announced since the last."""
    if published is not None and (stored := published.take()):
        report = report or StepReport()
        report.stored |= stored
    return report


def events_enabled(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM has KV events enabled."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


_CHUNKS_MAX = 32_768
"""Reported chunks that are kept track of, about 1 KiB each; of more the oldest are taken back."""
_PENDING_MAX = 1_024
"""Chunks being saved, and loads under way, of which each keeps its tokens; of more the oldest are
not reported."""
Name = tuple[str, bytes]
"""Namespace and prefix hash of a chunk."""
Find = Callable[[str], TrackedRequest | None]


@dataclass(slots=True)
class _Pending:
    """A chunk that is being saved."""

    events: dict[int, BlockStored] = field(default_factory=dict)
    """By group, of those being saved."""
    shards: set[str] = field(default_factory=set)
    """Fields that are stored."""


@dataclass(slots=True)
class _Reported:
    """A chunk that was reported."""

    until: float
    hashes: dict[int, list[Any]] = field(default_factory=dict)
    """By group."""


@dataclass(slots=True)
class _Load:
    """A load under way."""

    sync: bool
    events: list[tuple[Name, int, BlockStored | None]]
    """None where nothing new is to be reported."""


class NoEvents:
    """Where vLLM does not want any. The scheduler's thread only; never waits, never raises."""

    def planned(self, plan: StepPlan, find: Find) -> None:
        """A step's loads and saves, while their requests, which ``find`` finds, are there."""

    def update(self, output: "KVConnectorOutput") -> None:
        """All workers' reports of one step."""

    def reset(self) -> None:
        """Nothing that was reported is used by this replica any more."""

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
            ttl_s: life of a record; a chunk that this replica neither saved nor loaded meanwhile is
                taken back.
        """
        self._fields = [geometry.fields(group) for group in range(len(geometry.groups))]
        self._blocks = blocks
        self._ttl_s = ttl_s
        self._chunks_max = chunks_max
        self._pending_max = pending_max
        self._clock = clock
        self._pending: OrderedDict[Name, _Pending] = OrderedDict()
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        self._reported: OrderedDict[Name, _Reported] = OrderedDict()
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
        self._take_back(list(self._reported))

    @guarded(tuple[KVCacheEvent, ...]())
    def take(self) -> tuple[KVCacheEvent, ...]:
        """See ``NoEvents``."""
        now, overdue = self._clock(), []
        for name, known in self._reported.items():  # renewed ones were moved to the end
            if known.until > now:
                break
            overdue.append(name)
        self._take_back(overdue)
        events, self._events = tuple(self._events), []
        return events

    def __repr__(self) -> str:
        return f"<EventLog {len(self._reported)} chunks reported, {len(self._pending)} being saved>"

    def _save_planned(self, request: "Request", name: Name, move: ChunkMove) -> None:
        if (
            self._is_reported(name, move.group)
            or (event := self._blocks.stored(request, move)) is None
        ):
            return
        self._pending.setdefault(name, _Pending()).events[move.group] = event
        self._pending.move_to_end(name)
        _shrink(self._pending, self._pending_max)

    def _load_planned(
        self, request: "Request", namespace: str, move: ChunkMove
    ) -> tuple[Name, int, BlockStored | None]:
        name = namespace, move.prefix_hash
        known = self._is_reported(name, move.group)
        return name, move.group, None if known else self._blocks.stored(request, move)

    def _is_reported(self, name: Name, group: int) -> bool:
        return (known := self._reported.get(name)) is not None and group in known.hashes

    def _shard_stored(self, name: Name, shard: str) -> None:
        if (pending := self._pending.get(name)) is None:
            return
        pending.shards.add(shard)
        for group, event in list(pending.events.items()):
            if self._fields[group] <= pending.shards:
                del pending.events[group]
                self._report(name, group, event)
        if not pending.events:
            del self._pending[name]

    def _loaded(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        for name, group, event in load.events if load is not None else ():
            self._report(name, group, event)

    def _report(self, name: Name, group: int, event: BlockStored | None) -> None:
        if event is None and not self._is_reported(name, group):
            return
        known = self._reported.setdefault(name, _Reported(0.0))
        known.until = self._clock() + self._ttl_s
        self._reported.move_to_end(name)
        if event is not None and group not in known.hashes:
            known.hashes[group] = event.block_hashes
            self._events.append(event)
        if (over := len(self._reported) - self._chunks_max) > 0:
            self._take_back(list(self._reported)[:over])

    def _reject(self, names: Iterable[Name]) -> None:
        names = list(names)
        for name in names:
            if (pending := self._pending.get(name)) is not None:
                pending.shards.clear()  # what was stored of it is stored anew, or not at all
        self._take_back(names)

    def _take_back(self, names: Iterable[Name]) -> None:
        gone: dict[int, list[Any]] = {}
        for name in names:
            if (known := self._reported.pop(name, None)) is not None:
                for group, hashes in known.hashes.items():
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
    if not events_enabled(vllm_config):
        return NoEvents()
    hash_tokens = read_hash_tokens(vllm_config, kv_cache_config, geometry)
    return EventLog(geometry, BlockEvents(geometry, hash_tokens), ttl_s=config.ttl_s)


def _shrink(book: OrderedDict[Any, Any], size_max: int) -> None:
    while len(book) > size_max:
        book.popitem(last=False)
