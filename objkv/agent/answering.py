"""The agent's answers to what replicas ask about its index and its documents.

Replicas read the identities of namespaces and the operators' switch, and write identities that do
not exist yet. They get no other file, and no payload.
"""

import base64
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from itertools import islice
from threading import BoundedSemaphore
from typing import Any, Final

from objkv.agent.client import DOCUMENT_BYTES_MAX, Arguments, read_hashes, record_text
from objkv.agent.core import FoundRecords
from objkv.agent.held_back import HeldBackPayloads
from objkv.agent.memory.answers import AnswerBoard, LookupScope, PendingAnswer
from objkv.agent.messages import MALFORMED, PrefetchOrder
from objkv.agent.prefetch import Prefetches
from objkv.cache.lookup import LOOKUP_TTL_S
from objkv.cache.switch import SWITCH_PATH
from objkv.cache.worth import PutPolicy
from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import Savings, ShardRecords, WriteIndex
from objkv.index.fields import written_rows
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.stores.base import WriteStore

_IDENTITY = re.compile(r"[0-9a-f]{32}/identity\.json")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_LOOKUPS_MAX: Final = 64
"""Lookups that may wait for the index at once. Each holds a client's thread, and an index that
hangs would hold all of them, also of clients that have long gone."""
_MISSING_S: Final = 0.5
"""For how long it is remembered that a chunk is missing. Saves of this node end that at once."""


class NodeLookups:
    """Answers ``find`` from index and held-back payloads, and keeps it on a board. Thread-safe."""

    def __init__(
        self,
        index: WriteIndex,
        held: HeldBackPayloads,
        records: FoundRecords,
        board: AnswerBoard,
        *,
        ttl_s: float = LOOKUP_TTL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``records``: keeps what is found. ``ttl_s``: how long an answer is valid."""
        self._index, self._held, self.board = index, held, board
        self._records = records
        self._ttl_s, self._clock = ttl_s, clock
        self._free = BoundedSemaphore(_LOOKUPS_MAX)

    def find(self, namespace: str, hashes: bytes, fields: tuple[str, ...]) -> list[bytes]:
        """Return the text of each block of the answer for these prefix hashes."""

        def look_up(some: Sequence[bytes]) -> list[ShardRecords | None]:
            if not self._free.acquire(blocking=False):
                raise StoreUnavailable(f"{_LOOKUPS_MAX} lookups have no answer yet")
            try:
                return self._index.find(namespace, some, fields)
            finally:
                self._free.release()

        scope, now, step = LookupScope(namespace, fields), self._clock(), PREFIX_HASH_BYTES
        texts: list[bytes | PendingAnswer] = []
        all_pending, asked = list[PendingAnswer](), list[bytes]()
        for block in scope.blocks(hashes):
            key = scope.key(block)
            kept = self.board.find(key, now)
            text = None if kept is None else self.board.read(key, kept)
            if text is None:  # begun before it is looked up: what changes meanwhile is not kept
                divided = [block[at : at + step] for at in range(0, len(block), step)]
                all_pending.append(self.board.begin(key, divided))
                asked += divided
            texts.append(all_pending[-1] if text is None else text)
        try:
            found = iter(self._held.find(namespace, asked, fields, look_up) if asked else ())
            return [
                self._kept(scope, one, list(islice(found, len(one.hashes))), now)
                if isinstance(one, PendingAnswer)
                else one
                for one in texts
            ]
        finally:
            self.board.end(all_pending)

    def _kept(
        self,
        scope: LookupScope,
        pending: PendingAnswer,
        found: Sequence[ShardRecords | None],
        now: float,
    ) -> bytes:
        """Return the text of a block of the answer. It is on the board then."""
        if not pending.is_void:
            self._records.add(scope.namespace, zip(pending.hashes, found, strict=True))
        text = b"\n".join(written_rows(found, scope.fields))
        is_whole = {len(scope.fields)} == {0 if one is None else len(one) for one in found}
        ttl_s = self._ttl_s if is_whole else min(_MISSING_S, self._ttl_s)
        if ttl_s:
            self.board.write(pending, text, (now, now + ttl_s))
        return text


class NodeCalls:
    """Runs calls of replicas on the agent's index and bulk store. Thread-safe."""

    def __init__(
        self,
        index: WriteIndex,
        bulk: WriteStore,
        prefetches: Prefetches,
        policy: PutPolicy,
        *,
        ttl_s: int,
    ) -> None:
        """``ttl_s``: of records that clients touch, who may not know it."""
        self._index, self._bulk, self._prefetches = index, bulk, prefetches
        self._policy, self._ttl_s = policy, ttl_s

    def run(self, text: str) -> str:
        """Run a call and return its result. Raises ``StoreError``, also for an invalid call."""
        try:
            return json.dumps(self._run(json.loads(text)))
        except MALFORMED as exc:
            raise StoreDenied(f"an invalid call: {exc!r}"[:1000]) from exc

    def _run(self, call: Arguments) -> Any:
        match call["verb"]:
            case "lookup":
                found = self._index.lookup(_namespace(call), read_hashes(call))
                return [None if one is None else record_text(one) for one in found]
            case "touch":
                return self._index.touch(_namespace(call), read_hashes(call), ttl_s=self._ttl_s)
            case "credit":
                savings = Savings(**call["savings"])
                _namespace(call["savings"])
                if not all(type(one) is int for one in astuple(savings)[2:]):
                    raise ValueError("savings must be integers")
                self._policy.credited(savings)
                return self._index.credit(savings)
            case "prefetch":
                order = PrefetchOrder(**call["order"])
                return asdict(self._prefetches.start(_namespace(call), read_hashes(call), order))
            case "get":
                path, start = call["path"], max(0, int(call.get("start", 0)))
                if path != SWITCH_PATH:
                    _check_identity(path)
                document = self._bulk.get(path, start, start + DOCUMENT_BYTES_MAX)
                return None if document is None else base64.b64encode(document).decode()
            case "put":
                _check_identity(call["path"])
                content = base64.b64decode(call["document"])
                return self._bulk.put_if_absent(call["path"], content)
        raise ValueError("an unknown verb")


def _namespace(call: Arguments) -> str:
    name: str = call["namespace"]
    if _NAMESPACE.fullmatch(name) is None:
        raise ValueError("an invalid namespace")
    return name


def _check_identity(path: str) -> None:
    if _IDENTITY.fullmatch(path) is None:
        raise StoreDenied(f"replicas have no access to {path[:100]!r}")
