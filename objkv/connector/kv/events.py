"""KV events: reports the chunks that this replica has found in the store, in vLLM's format, with
the hashes that vLLM gives the same blocks on the device. A chunk is ``BlockStored`` when payloads
with all of one of its groups are stored, or a load of it succeeded, and ``BlockRemoved`` when it is
found missing, or no longer tracked. Both have their own medium, so they do not affect the device's
blocks. Source: vLLM 0.31-0.33, ``distributed/kv_events.py``. See ``docs/routers.md``."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import gcd
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from objkv.cache.match import covered, stored_blocks
from objkv.config import Config
from objkv.connector.guard import guarded
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.kv.requests import TrackedRequest
from objkv.connector.model.groups import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


Locality = Literal["LOCAL", "REMOTE"]
OWNERSHIP = "objkv"
"""Name of the tier in all events. Their medium is that of vLLM's own storage tiers."""


def read_hash_tokens(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", geometry: Geometry
) -> int:
    """Return the number of tokens per block hash of vLLM."""
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
    """Return an event with those fields that this version of vLLM has."""
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in values.items() if name in known})


def events_enabled(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM has KV events enabled."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


_CHUNKS_MAX = 32_768
"""Reported chunks to track, about 1 KiB each. Beyond this the oldest are reported as removed."""
_PENDING_MAX = 1_024
"""Saves and loads in progress to track. Beyond this the oldest are not reported."""
Name = tuple[str, bytes]
"""Namespace and prefix hash of a chunk."""
Find = Callable[[str], TrackedRequest | None]


@dataclass(slots=True)
class _Pending:
    """A chunk that is being saved."""

    events: dict[int, BlockStored] = field(default_factory=dict)
    """Events of the groups being saved, by group."""
    shards: set[str] = field(default_factory=set)
    """Fields of the stored shards."""


@dataclass(slots=True)
class _Reported:
    """A chunk that was reported."""

    until: float
    """Time on the log's clock at which it is reported as removed."""
    hashes: dict[int, list[Any]] = field(default_factory=dict)
    """Reported hashes by group."""


_LoadEvents = list[tuple[Name, int, BlockStored | None]]
"""Chunk, group and event of a load in progress, None if the chunk is already reported."""


class EventLog:
    """The KV events that vLLM has not taken. For the scheduler's thread only. Never raises."""

    def __init__(
        self,
        geometry: Geometry,
        hash_tokens: int,
        locality: Locality = "REMOTE",
        *,
        ttl_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``hash_tokens``: tokens per block hash of vLLM, a divisor of every group's block size.
        ``locality``: of the bulk store. ``ttl_s``: after this long without a save or load by this
        replica, a chunk is reported as removed."""
        self._of_table: dict[int, list[int]] = {}
        """The groups with payloads of each block table, by the table's first group."""
        first = dict[int, int]()
        for group, identity in enumerate(geometry.groups[: geometry.target_count]):
            alike = self._of_table.setdefault(first.setdefault(geometry.table(group), group), [])
            if stored_blocks(identity, geometry.chunk_tokens):
                alike.append(group)
        self._geometry, self._hash_tokens, self._locality = geometry, hash_tokens, locality
        self._ttl_s, self._clock = ttl_s, clock
        self._pending: OrderedDict[Name, _Pending] = OrderedDict()
        self._loads: OrderedDict[str, _LoadEvents] = OrderedDict()
        self._reported: OrderedDict[Name, _Reported] = OrderedDict()
        self._events: list[KVCacheEvent] = []

    @guarded(None)
    def planned(self, plan: StepPlan, find: Find) -> None:
        """Record a step's loads and saves. ``find`` returns their requests, which still exist."""
        for save in plan.saves:
            if (tracked := find(save.request_id)) is None:
                continue
            for one in save.moves:
                name, group = (save.namespace, one.move.prefix_hash), one.move.group
                event = self._event(tracked.request, name, group, one.move.token_end)
                if event is not None:
                    self._pending.setdefault(name, _Pending()).events[group] = event
                    self._pending.move_to_end(name)
                    _shrink(self._pending)
        for load in plan.loads:
            if (tracked := find(load.request_id)) is None:
                continue
            moves = load.moves
            ends = {
                ((load.namespace, prefix_hash), moves.sources[source].group): end
                for prefix_hash, _, _, end, source in moves.claims(
                    load.namespace, range(len(moves))
                )
            }
            self._loads[load.request_id] = [
                (name, group, self._event(tracked.request, name, group, end))
                for (name, group), end in ends.items()
            ]
            _shrink(self._loads)

    @guarded(None)
    def update(self, report: StepReport, ended: Iterable[str]) -> None:
        """Record the workers' report of a step, and the requests whose loads succeeded."""
        for request_id in report.failed:
            self._loads.pop(request_id, None)
        for namespace, prefix_hash, shard in report.stored:
            self._shard_stored((namespace, prefix_hash), shard)
        for request_id in ended:
            for name, group, event in self._loads.pop(request_id, ()):
                self._report(name, group, event)
        for name in report.rejected:
            if (pending := self._pending.get(name)) is not None:
                pending.shards.clear()  # its shards are stored again, or not at all
        self._report_removed(report.rejected)

    @guarded(None)
    def reset(self) -> None:
        """Record that this replica no longer uses anything reported so far."""
        self._pending.clear()
        self._loads.clear()
        self._report_removed(list(self._reported))

    @guarded(())
    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call in the order in which they happened."""
        now, overdue = self._clock(), []
        for name, known in self._reported.items():  # renewed ones were moved to the end
            if known.until > now:
                break
            overdue.append(name)
        self._report_removed(overdue)
        events, self._events = tuple(self._events), []
        return events

    def _event(self, request: "Request", name: Name, number: int, end: int) -> BlockStored | None:
        """Return the event that a chunk is stored, None if it is reported or not hashed by vLLM.
        ``number``: of its group. ``end``: after its last token. But for medium, locality and
        ownership it equals the device's. Source: vLLM 0.31-0.33, ``cache_full_blocks``."""
        group = self._geometry.position(number)
        # Blocks are reported once, whatever caches they have, and a draft's do not count.
        if group not in self._of_table or self._is_reported(name, number):
            return None
        identity, unit = self._geometry.groups[group], self._hash_tokens
        size = identity.block_size
        start = end - stored_blocks(identity, self._geometry.chunk_tokens) * size
        known = request.block_hashes
        # There is one hash per unit of tokens, except for tokens that a drafter still needs.
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
            medium=MEDIUM_STORAGE,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(request, start, end, size),
            group_idx=self._geometry.table(group),
            locality=self._locality,
            ownership=OWNERSHIP,
        )

    def _is_reported(self, name: Name, group: int) -> bool:
        return (known := self._reported.get(name)) is not None and group in known.hashes

    def _shard_stored(self, name: Name, shard: str) -> None:
        if (pending := self._pending.get(name)) is None:
            return
        pending.shards.add(shard)
        for group, event in list(pending.events.items()):
            groups = self._of_table[group]
            if all(covered(pending.shards, g, self._geometry.groups[g]) for g in groups):
                del pending.events[group]
                self._report(name, group, event)
        if not pending.events:
            del self._pending[name]

    def _report(self, name: Name, group: int, event: BlockStored | None) -> None:
        if event is None and not self._is_reported(name, group):
            return
        known = self._reported.setdefault(name, _Reported(0.0))
        known.until = self._clock() + self._ttl_s
        self._reported.move_to_end(name)
        if event is not None and group not in known.hashes:
            known.hashes[group] = event.block_hashes
            self._events.append(event)
        if (over := len(self._reported) - _CHUNKS_MAX) > 0:
            self._report_removed(list(self._reported)[:over])

    def _report_removed(self, names: Iterable[Name]) -> None:
        gone: dict[int, list[Any]] = {}
        for name in names:
            if (known := self._reported.pop(name, None)) is not None:
                for group, hashes in known.hashes.items():
                    gone.setdefault(group, []).extend(hashes)
        for group, hashes in gone.items():
            event = _made(
                BlockRemoved,
                block_hashes=hashes,
                medium=MEDIUM_STORAGE,
                group_idx=self._geometry.table(group),
                locality=self._locality,
                ownership=OWNERSHIP,
            )
            self._events.append(event)


def open_event_log(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", geometry: Geometry, config: Config
) -> EventLog | None:
    """Return a log, or None unless vLLM has KV events enabled."""
    if not events_enabled(vllm_config):
        return None
    hash_tokens = read_hash_tokens(vllm_config, kv_cache_config, geometry)
    place: Locality = "LOCAL" if config.bulk_url.startswith("file:") else "REMOTE"
    return EventLog(geometry, hash_tokens, place, ttl_s=config.ttl_s)


def _shrink(book: OrderedDict[Any, Any]) -> None:
    while len(book) > _PENDING_MAX:
        book.popitem(last=False)
