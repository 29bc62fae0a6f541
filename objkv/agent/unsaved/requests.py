"""Requests to other nodes to put payloads that they hold back, made by lookups that miss them.

The index has the holder of each payload that was sighted. A lookup that ends at such a payload
leaves a request for its holder, and answers that the chunk is coming, so that the replica looks
again instead of computing at once. Nothing waits here, and payloads come by way of the bulk store
like all others. Whatever fails, the answer is that the chunk is missing.
"""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Final

from objkv.errors import StoreDenied, StoreError
from objkv.index.base import Shards, WriteIndex
from objkv.index.fields import COMING
from objkv.keys.chunk import payload_path
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)
_COMING_S: Final = 6.0
"""How long a requested chunk may be coming. Replicas wait less."""
_ANSWER_S: Final = 3.0
"""A holder that has answered nothing for this time is silent."""
_SILENT_S: Final = 30.0
"""How long nothing is requested of a silent holder."""
CHUNKS_MAX: Final = 1024
"""Per request."""
_PENDING_MAX: Final = 65_536
_HOLDERS_MAX: Final = 1024
_NAMESPACE_CHARS = 32
Chunk = tuple[str, bytes]
"""Namespace and prefix hash."""


@dataclass(frozen=True, slots=True)
class PutRequest:
    """Payloads that a holder is to put, if it has them: of each chunk in each field."""

    namespace: str
    fields: tuple[str, ...]
    hashes: tuple[bytes, ...]

    def pack(self) -> bytes:
        """Return the request as text: namespace and fields, each with a line end, then hashes."""
        head = f"{self.namespace}\n{' '.join(self.fields)}\n"
        return head.encode("ascii") + b"".join(self.hashes)

    @classmethod
    def unpack(cls, text: bytes) -> "PutRequest":
        """Read a request. Raises ``ValueError``."""
        namespace, fields, hashes = text.split(b"\n", 2)
        count, rest = divmod(len(hashes), PREFIX_HASH_BYTES)
        if len(namespace) != _NAMESPACE_CHARS or rest or not 0 < count <= CHUNKS_MAX:
            raise ValueError("an invalid request to put payloads")
        step = PREFIX_HASH_BYTES
        return cls(
            namespace.decode("ascii"),
            tuple(fields.decode("ascii").split()),
            tuple(hashes[at : at + step] for at in range(0, len(hashes), step)),
        )

    def paths(self) -> list[str]:
        """Return the paths of all payloads, chunk by chunk."""
        return [payload_path(self.namespace, h, f) for h in self.hashes for f in self.fields]


@dataclass(frozen=True, slots=True)
class _Pending:
    holders: Mapping[str, str]
    """Those of the chunk's requested payloads, by field."""
    since: float

    def is_whole(self, shards: Shards) -> bool:
        return all(field in shards for field in self.holders)


@dataclass(slots=True)
class _Holder:
    unanswered: Chunk | None = None
    """The first chunk that was requested since its last answer."""
    fields: tuple[str, ...] = ()
    since: float = 0.0
    silent_until: float = 0.0


class PutRequests:
    """Thread-safe. ``complete`` takes one round trip for a lookup that misses a chunk, and three if
    another node holds it back."""

    def __init__(
        self,
        index: WriteIndex,
        own: str,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``own``: this agent's name as a holder."""
        self._index, self._own = index, own
        self._recorder, self._clock = recorder, clock
        self._lock = Lock()
        self._pending: OrderedDict[Chunk, _Pending] = OrderedDict()
        self._holders: OrderedDict[str, _Holder] = OrderedDict()
        self._is_denied = False

    def complete(
        self,
        namespace: str,
        hashes: Sequence[bytes],
        fields: tuple[str, ...],
        found: Sequence[Shards | None],
    ) -> Sequence[Shards | None]:
        """Return what a lookup ``found`` of a prompt, with ``COMING`` for chunks from its first
        missing one on that other nodes were requested to put."""
        first = self._first_missing(namespace, hashes, found)
        if first == len(hashes) or self._is_denied:
            return found
        try:
            end = self._pending_until(namespace, hashes, found, first)
            if end is None:
                end = self._request(namespace, hashes, fields, found, first)
        except StoreDenied as exc:
            self._is_denied = True
            logger.error("payloads of other nodes not requested reason=%s", exc)
            return found
        except StoreError:
            self._recorder.count("agent_put_request_errors")
            return found
        if end == first:
            return found
        return [*found[:first], *[COMING] * (end - first), *found[end:]]

    def __repr__(self) -> str:
        return f"<PutRequests {len(self._pending)} chunks of {len(self._holders)} holders>"

    def _first_missing(
        self, namespace: str, hashes: Sequence[bytes], found: Sequence[Shards | None]
    ) -> int:
        pending = self._pending
        for place, shards in enumerate(found):
            if shards is None:
                return place
            if pending and (one := pending.get((namespace, hashes[place]))) is not None:
                if not one.is_whole(shards):
                    return place
                self._came((namespace, hashes[place]))
        return len(found)

    def _pending_until(
        self, namespace: str, hashes: Sequence[bytes], found: Sequence[Shards | None], first: int
    ) -> int | None:
        """Return the end of the chunks that are still coming, from ``first`` on; None if that one
        was not requested, or was given up."""
        now, pending = self._clock(), list[_Pending]()
        for prefix_hash in hashes[first:]:
            one = self._pending.get((namespace, prefix_hash))
            if one is None:
                break
            if now - one.since >= _COMING_S:
                self._end((namespace, prefix_hash), "agent_puts_late", len(one.holders))
                break
            pending.append(one)
        if not pending:
            return None
        awaited = [
            (place, payload_path(namespace, hashes[place], field), holder)
            for place, one in enumerate(pending, start=first)
            for field, holder in one.holders.items()
            if field not in (found[place] or ())
        ]
        current = self._index.holders([path for _, path, _ in awaited])
        for (place, _, holder), holds in zip(awaited, current, strict=True):
            if holds != holder:  # it does not have the payload any more
                one = pending[place - first]
                self._end((namespace, hashes[place]), "agent_puts_refused", len(one.holders))
                self._answered(one)
                return place
        return first + len(pending)

    def _request(
        self,
        namespace: str,
        hashes: Sequence[bytes],
        fields: tuple[str, ...],
        found: Sequence[Shards | None],
        first: int,
    ) -> int:
        """Request the chunks from ``first`` on that other nodes hold back. Returns their end."""
        if found[first] is not None or not self._held(namespace, hashes[first : first + 1], fields):
            return first
        end = first
        while end < len(found) and found[end] is None and end - first < CHUNKS_MAX:
            end += 1
        held = self._held(namespace, hashes[first:end], fields)
        wanted: defaultdict[str, dict[bytes, None]] = defaultdict(dict)
        for prefix_hash, holders in zip(hashes[first:end], held, strict=False):
            for holder in holders.values():
                wanted[holder][prefix_hash] = None
        lost = {
            holder
            for holder, chunks in wanted.items()
            if not self._send(holder, PutRequest(namespace, fields, tuple(chunks)))
        }
        now, count = self._clock(), 0
        with self._lock:
            for prefix_hash, holders in zip(hashes[first:end], held, strict=False):
                if not lost.isdisjoint(holders.values()):
                    break
                self._pending[namespace, prefix_hash] = _Pending(holders, now)
                self._recorder.count("agent_puts_requested", len(holders))
                count += 1
            while len(self._pending) > _PENDING_MAX:
                self._pending.popitem(last=False)
        return first + count

    def _held(
        self, namespace: str, hashes: Sequence[bytes], fields: tuple[str, ...]
    ) -> list[dict[str, str]]:
        """Return the holders of the leading chunks that other nodes hold back, by field."""
        names = [payload_path(namespace, one, field) for one in hashes for field in fields]
        holders = iter(self._index.holders(names))
        found: list[dict[str, str]] = []
        for _ in hashes:
            chunk = {field: next(holders) for field in fields}
            if self._own in chunk.values():  # and does not have it any more
                break
            if not (chunk := {field: one for field, one in chunk.items() if one}):
                break
            if any(map(self._is_silent, set(chunk.values()))):
                break
            found.append(chunk)
        return found

    def _send(self, holder: str, request: PutRequest) -> bool:
        """Leave a request. A holder that reads none is silent."""
        is_sent = self._index.request(holder, request.pack())
        now = self._clock()
        with self._lock:
            one = self._holders.setdefault(holder, _Holder())
            self._holders.move_to_end(holder)
            if not is_sent:
                one.silent_until = now + _SILENT_S
            elif one.unanswered is None:
                one.unanswered = request.namespace, request.hashes[0]
                one.fields, one.since = request.fields, now
            if len(self._holders) > _HOLDERS_MAX:
                self._holders.popitem(last=False)
        return is_sent

    def _is_silent(self, holder: str) -> bool:
        one, now = self._holders.get(holder), self._clock()
        if one is None or one.silent_until > now:
            return one is not None
        chunk = one.unanswered
        if chunk is None or now - one.since < _ANSWER_S:
            return False
        # Replicas may have waited less, so nothing has looked whether it has come.
        (shards,) = self._index.find(chunk[0], [chunk[1]], one.fields)
        if shards is None:
            names = [payload_path(*chunk, field) for field in one.fields]
            if holder in self._index.holders(names):
                one.unanswered, one.silent_until = None, now + _SILENT_S
                self._recorder.count("agent_put_holders_silent")
                return True
        one.unanswered = None
        return False

    def _came(self, chunk: Chunk) -> None:
        if (one := self._pending.get(chunk)) is not None:
            self._end(chunk, "agent_puts_came", len(one.holders))
            self._answered(one)

    def _end(self, chunk: Chunk, counter: str, payloads: int) -> None:
        with self._lock:
            if self._pending.pop(chunk, None) is not None:
                self._recorder.count(counter, payloads)

    def _answered(self, pending: _Pending) -> None:
        for holder in set(pending.holders.values()):
            if (one := self._holders.get(holder)) is not None:
                one.unanswered = None
