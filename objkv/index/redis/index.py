"""An index in Redis or Valkey (6.2 or newer, also clustered), shared by a fleet.

``docs/indexes.md`` specifies layout, commands and access rights. No module commands are used, and
every key except the totals has a time to live.
"""

import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from threading import Lock
from typing import Any

import redis
from redis import exceptions

from objkv.errors import StoreError
from objkv.index.base import ChunkEntry, Lease, Record, Savings, ShardRecord, ShardRecords, Usage
from objkv.index.fields import (
    decode_shard,
    encode_shard,
    read_savings,
    savings_fields,
    shards_of,
    sighting_name,
)
from objkv.index.redis.find import Finder
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.net.redis_errors import translated, translation

Keys = tuple[str, ...]


class Script:
    """A Lua script, sent by digest, or with its text to a server that has not cached it. Redis runs
    it atomically. Each touches one key, or a chunk's record and a lease, which a cluster keeps in
    the same place.

    ``redis.pcall`` returns a table if a key has another type, and so is not objkv's. Such a key is
    treated as absent, and replaced when a chunk is published.
    """

    def __init__(self, text: str) -> None:
        # Redis identifies scripts by SHA-1; its collision resistance does not matter here.
        sha = hashlib.sha1(text.encode("ascii"), usedforsecurity=False).hexdigest()
        self.known, self.full = ("EVALSHA", sha), ("EVAL", text)
        """The beginnings of a command for a server that has it cached, and for any."""


_LIVE = """\
local ttl = tonumber(ARGV[1])
if redis.call('HEXISTS', KEYS[1], 'pin') == 1 then
  ttl = math.max(ttl, redis.call('PTTL', KEYS[1]))
end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', ttl))
"""
"""Sets the record's time to live, in ms. Does not shorten the rest of a pin."""
_SIZE = """\
local function size(shard) return tonumber(string.match(shard, '^(%d+) ')) or 0 end
"""

PUBLISH = Script(f"""\
{_SIZE}
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
local nbytes, payloads = 0, 0
for i = 3, #ARGV, 2 do
  if string.find(ARGV[i], '^%d') then
    local was = redis.call('HGET', KEYS[1], ARGV[i])
    nbytes = nbytes + size(ARGV[i + 1]) - (was and size(was) or 0)
    payloads = payloads + (was and 0 or 1)
  end
end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
{_LIVE}
if KEYS[2] and redis.pcall('GET', KEYS[2]) == ARGV[2] then redis.call('DEL', KEYS[2]) end
return {{nbytes, payloads}}
""")
"""KEYS: the record, and perhaps a lease that ends. ARGV: time to live in ms, the lease's owner,
then fields and values. Returns the changes in bytes and payloads."""

TOUCH = Script(f"""\
if redis.pcall('HEXISTS', KEYS[1], 'p') ~= 1 then return 0 end
local hits = tonumber(redis.call('HGET', KEYS[1], 'h')) or 0
redis.call('HSET', KEYS[1], 'h', string.format('%.0f', hits + 1), 'u', ARGV[2])
{_LIVE}
return 1
""")
"""ARGV: time to live in ms, seconds since the epoch."""

FORGET = Script("""\
if redis.pcall('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.find(field, '^%d') then return 1 end
end
redis.call('DEL', KEYS[1])
return 1
""")
"""ARGV: field, the value it must have."""

PIN = Script("""\
if redis.pcall('HEXISTS', KEYS[1], 'p') ~= 1 then return 0 end
if ARGV[1] == '0' then
  redis.call('HDEL', KEYS[1], 'pin')
else
  redis.call('HSET', KEYS[1], 'pin', ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
""")
"""ARGV: end of the pin in seconds since the epoch or 0, time to live in ms."""

DROP = Script(f"""\
{_SIZE}
local nbytes, payloads = 0, 0
if redis.call('TYPE', KEYS[1])['ok'] == 'hash' then
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if string.find(field, '^%d') then
      nbytes, payloads = nbytes + size(redis.call('HGET', KEYS[1], field)), payloads + 1
    end
  end
end
return {{redis.call('DEL', KEYS[1]), nbytes, payloads}}
""")
"""Returns whether the key existed, how many bytes, and how many payloads."""

LEASE = Script("""\
if redis.pcall('GET', KEYS[1]) == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
return 0
""")
"""ARGV: owner, time to live in ms."""

RELEASE = Script("""\
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
""")
"""ARGV: owner."""


Command = tuple[str | bytes | int, ...]
_FLUSH_S = 5.0
"""How long changes of the totals wait at least."""
_TOTALS = ("nbytes", "payloads", "counted")
_NUMBER = re.compile(rb"-?[0-9]{1,18}")


class PendingTotals:
    """This process's changes of running totals, a single Redis hash to which all processes of a
    fleet add. Thread-safe.

    They are sent every few seconds, along with a command that is sent anyway, or by ``flush``. So
    no save waits for it, and a thousand replicas write the one key only a few hundred times per
    second. A killed process's changes are lost until the totals are counted again.
    """

    def __init__(self, key: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._lock = Lock()
        self._pending: defaultdict[str, int] = defaultdict(int)
        self._due_s = clock() + _FLUSH_S

    def add(self, namespace: str, nbytes: int, payloads: int) -> None:
        self.add_changes({f"{namespace}:nbytes": nbytes, f"{namespace}:payloads": payloads})

    def is_due(self) -> bool:
        return self._clock() >= self._due_s

    def drain(self, *, early: bool = False) -> dict[str, int]:
        """Return and clear the changes by field if they are due, or ``early``."""
        now = self._clock()
        with self._lock:
            if not (early or self.is_due()):
                return {}
            taken = {field: change for field, change in self._pending.items() if change}
            self._pending.clear()
            self._due_s = now + _FLUSH_S
        return taken

    def add_changes(self, taken: Mapping[str, int]) -> None:
        """Keep new changes, and those that could not be sent. If these arrived after all, the
        totals are too high, but never too low."""
        with self._lock:
            for field, change in taken.items():
                self._pending[field] += change


Client = redis.Redis | redis.RedisCluster
_SCAN_KEYS = 1_000
_TOKENS = re.compile(rb"(\d{1,15})-(\d{1,15})")
_PATH = re.compile(rf"([^/]+)/../([0-9a-f]{{{2 * PREFIX_HASH_BYTES}}})/(.+)")


class RedisIndex:
    """Implements ``PruneIndex``. Owns ``client``, which returns bytes and has the deadlines.
    ``clock`` (seconds since the epoch) only dates touches; the server decides when records
    expire."""

    def __init__(
        self, client: Client, *, prefix: str = "objkv", clock: Callable[[], float] = time.time
    ) -> None:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", prefix)
        self.client = client
        self.prefix = prefix
        """Of all keys, without the colon."""
        self._clock = clock
        self._finder = Finder(client)
        self._totals = PendingTotals(f"{prefix}:u:totals")
        self._savings = PendingTotals(f"{prefix}:u:savings")
        self._key = re.compile(
            rf"{re.escape(prefix)}:i:([^:]+):([0-9a-f]{{{2 * PREFIX_HASH_BYTES}}})".encode("ascii")
        )

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        replies = self._pipelined(
            "lookup", [("HGETALL", self._chunk(namespace, one)) for one in prefix_hashes]
        )
        now = self._clock()
        return [
            _record(prefix_hash, reply, now)
            for prefix_hash, reply in zip(prefix_hashes, replies, strict=True)
        ]

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None]:
        """Reads and checks only these fields of a record."""
        found = None
        if prefix_hashes and fields:
            with translated("redis index, find"):
                found = self._finder.find(f"{self.prefix}:i:{namespace}:", prefix_hashes, fields)
        if found is None:
            return [shards_of(record, fields) for record in self.lookup(namespace, prefix_hashes)]
        return found

    def scan(self, namespace: str) -> Iterator[Record]:
        """Walks all keys of the server in batches."""
        keys = self._keys(f"{self.prefix}:i:{namespace}:*")
        hashes = (prefix_hash for found, prefix_hash in keys if found == namespace)
        while batch := list(islice(hashes, _SCAN_KEYS)):
            yield from filter(None, self.lookup(namespace, batch))

    def namespaces(self) -> list[str]:
        """Walks all keys of the server: every save of the fleet would write the one key of a list,
        which would name expired namespaces, too."""
        return sorted({namespace for namespace, _ in self._keys(f"{self.prefix}:i:*")})

    def usage(self) -> list[Usage]:
        """Returns running totals, without recent changes of other processes."""
        numbers, found = self._numbers("usage", self._totals), []
        for name in sorted({field.partition(":")[0] for field in numbers}):
            nbytes, payloads, counted_s = (numbers.get(f"{name}:{kind}", 0) for kind in _TOTALS)
            if nbytes > 0 or payloads > 0:
                found.append(Usage(name, max(0, nbytes), max(0, payloads), counted_s))
        return found

    def savings(self) -> list[Savings]:
        return read_savings(self._numbers("savings", self._savings))

    def _numbers(self, verb: str, totals: PendingTotals) -> dict[str, int]:
        """Send this process's changes of ``totals``. Return the fleet's that are numbers."""
        reply = self._flush(verb, totals, "HGETALL", totals.key)
        return {
            field.decode("utf-8", "replace"): int(value)
            for field, value in reply.items()
            if _NUMBER.fullmatch(value)
        }

    def _flush(self, verb: str, totals: PendingTotals, *command: str | int) -> Any:
        """Send this process's changes of ``totals``, then ``command``. Return its reply."""
        [reply] = self._flushed(verb, totals, totals.drain(early=True), command)
        return _checked(verb, reply)

    def check(self) -> None:
        """Runs a script, which needs most of the rights that objkv needs."""
        self._run("check", RELEASE, (self._lease("check"),), "nobody")

    def close(self) -> None:
        with translated("redis index, close"):
            with suppress(StoreError):
                self.flush(early=True)
            self._finder.close()
            self.client.close()

    def publish(
        self, chunk: ChunkEntry, shards: ShardRecords, *, ttl_s: int, lease: Lease | None = None
    ) -> None:
        assert shards
        assert all(field[:1].isdigit() for field in shards)  # the record's own fields are letters
        args: list[str | bytes | int] = [ttl_s * 1000, "" if lease is None else lease.owner]
        args += ["p", chunk.parent_hash, "t", f"{chunk.token_start}-{chunk.token_end}"]
        for field, shard in shards.items():
            args += [field, encode_shard(shard)]
        keys: Keys = (self._chunk(chunk.namespace, chunk.prefix_hash),)
        if lease is not None:
            keys = (*keys, self._lease(lease.name))
        nbytes, payloads = self._run("publish", PUBLISH, keys, *args)
        self._totals.add(chunk.namespace, nbytes, payloads)

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        """One pipelined round trip."""
        keys = [self._chunk(namespace, prefix_hash) for prefix_hash in dict.fromkeys(prefix_hashes)]
        self._run_all("touch", TOUCH, [(key,) for key in keys], ttl_s * 1000, int(self._clock()))

    def credit(self, savings: Savings) -> None:
        """Sends the sums every few seconds."""
        self._savings.add_changes(savings_fields(savings))
        self.flush()

    def flush(self, *, early: bool = False) -> None:
        """A round trip only if changes are due, or ``early``."""
        for totals in (self._totals, self._savings):
            if changes := totals.drain(early=early):
                self._flushed("flush", totals, changes)

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        key = self._chunk(namespace, prefix_hash)
        gone = bool(self._run("forget", FORGET, (key,), field, encode_shard(expected)))
        if gone:
            self._totals.add(namespace, -expected.nbytes, -1)
        return gone

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        return bool(self._run("lease", LEASE, (self._lease(name),), owner, ttl_ms))

    def release(self, name: str, owner: str) -> None:
        self._run("release", RELEASE, (self._lease(name),), owner)

    def record_sightings(self, names: Sequence[str], *, ttl_s: int) -> list[bool]:
        """One pipelined round trip."""
        keys = [f"{self.prefix}:s:{sighting_name(name)}" for name in names]
        replies = self._pipelined("sight", [("SET", k, "", "EX", ttl_s, "GET") for k in keys])
        return [_checked("sight", reply) is not None for reply in replies]

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        ttl_ms = max(ttl_s * 1000, int((until_s - self._clock()) * 1000))
        return bool(self._run("pin", PIN, (self._chunk(namespace, prefix_hash),), until_s, ttl_ms))

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        """Also removes malformed records."""
        found, nbytes, payloads = self._run("drop", DROP, (self._chunk(namespace, prefix_hash),))
        self._totals.add(namespace, -nbytes, -payloads)
        return bool(found)

    def set_usage(self, usage: Usage) -> None:
        fields = [f"{usage.namespace}:{kind}" for kind in _TOTALS]
        command: list[str | int] = ["HDEL", self._totals.key, *fields]
        if usage.payloads:
            command = ["HSET", self._totals.key]
            for pair in zip(fields, (usage.nbytes, usage.payloads, usage.counted_s), strict=True):
                command += pair
        self._flush("set usage", self._totals, *command)

    def _chunk(self, namespace: str, prefix_hash: bytes) -> str:
        return f"{self.prefix}:i:{namespace}:{prefix_hash.hex()}"

    def _lease(self, name: str) -> str:
        """Return the key of a lease. A cluster, which looks only at what is in braces, keeps that
        of a payload where the chunk's record is."""
        if (path := _PATH.fullmatch(name)) is None:
            return f"{self.prefix}:l:{name}"
        namespace, prefix_hash, payload = path.groups()
        return f"{self.prefix}:l:{{{self.prefix}:i:{namespace}:{prefix_hash}}}:{payload}"

    def _run(self, verb: str, script: Script, keys: Keys, *args: str | bytes | int) -> Any:
        """Return the script's reply for the keys of one call, see ``_run_all``."""
        with translated(f"redis index, {verb}"), suppress(exceptions.NoScriptError):
            run: Callable[..., object] = self.client.execute_command
            if not self._totals.is_due():  # a pipeline costs half as much again
                return run(*script.known, len(keys), *keys, *args)
        return self._run_all(verb, script, [keys], *args)[0]

    def _run_all(
        self, verb: str, script: Script, calls: Sequence[Keys], *args: str | bytes | int
    ) -> list[Any]:
        """Return the script's replies for the keys of each call, in order, after one pipelined
        round trip. Due changes of the totals share it."""
        rests = [(len(keys), *keys, *args) for keys in calls]
        known = [(*script.known, *rest) for rest in rests]
        replies = self._flushed(verb, self._totals, self._totals.drain(), *known)
        unknown = [n for n, one in enumerate(replies) if isinstance(one, exceptions.NoScriptError)]
        again = self._pipelined(verb, [(*script.full, *rests[place]) for place in unknown])
        for place, reply in zip(unknown, again, strict=True):
            replies[place] = reply
        return [_checked(verb, reply) for reply in replies]

    def _flushed(
        self, verb: str, totals: PendingTotals, changes: Mapping[str, int], *commands: Command
    ) -> list[Any]:
        """Return the replies to ``commands``. Sends changes of ``totals`` first, and keeps those
        that fail."""
        try:
            adding = [("HINCRBY", totals.key, field, change) for field, change in changes.items()]
            replies = self._pipelined(verb, [*adding, *commands])
        except StoreError:
            totals.add_changes(changes)
            raise
        pairs = zip(changes.items(), replies, strict=False)
        totals.add_changes(dict(pair for pair, reply in pairs if isinstance(reply, Exception)))
        return replies[len(changes) :]

    def _pipelined(self, verb: str, commands: Sequence[Command]) -> list[Any]:
        """Return all replies, with errors as values, after a round trip, or one per cluster
        node."""
        if not commands:
            return []
        with (
            translated(f"redis index, {verb}"),
            self.client.pipeline(transaction=False) as pipeline,
        ):
            queue: Callable[..., object] = pipeline.execute_command
            for command in commands:
                # By name, because the cluster's pipeline refuses the method ``evalsha``, although
                # scripts with one key run anywhere.
                queue(*command, **self._where(command))
            return pipeline.execute(raise_on_error=False)

    def _where(self, command: Command) -> dict[str, Any]:
        """Return the cluster node of a script's key. Without it redis-py 8.1 queries a server
        (``COMMAND GETKEYS``), one round trip for each command of a pipeline."""
        if command[0] in ("EVAL", "EVALSHA") and isinstance(self.client, redis.RedisCluster):
            find: Callable[[str], object] = self.client.get_node_from_key
            node = find(str(command[3]))
            return {"target_nodes": node} if node else {}
        return {}

    def _keys(self, pattern: str) -> Iterator[tuple[str, bytes]]:
        with translated("redis index, scan"):
            keys = self.client.scan_iter(match=pattern, count=_SCAN_KEYS)
        while True:
            with translated("redis index, scan"):
                key = next(keys, None)
            if key is None:
                return
            if match := self._key.fullmatch(key):
                yield match[1].decode("utf-8", "replace"), bytes.fromhex(match[2].decode("ascii"))


def _checked(verb: str, reply: Any) -> Any:
    """Return ``reply``. Raises it as a ``StoreError`` if it is an error."""
    if isinstance(reply, Exception):
        raise translation(f"redis index, {verb}", reply) from reply
    return reply


def _record(prefix_hash: bytes, reply: Any, now: float) -> Record | None:
    """Return the record from a reply to ``HGETALL``; None if it is missing or not objkv's."""
    if isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE"):  # not objkv's
        return None
    shards = {}
    for name, value in _checked("lookup", reply).items():
        if name[:1].isdigit() and (shard := decode_shard(value)):
            shards[name.decode("utf-8", "replace")] = shard
    try:
        tokens, parent_hash = _TOKENS.fullmatch(reply[b"t"]), reply[b"p"]
        hits, touched_s = int(reply.get(b"h", 0)), int(reply.get(b"u", 0))
        pinned_until_s = int(reply.get(b"pin", 0))
    except (KeyError, ValueError):
        return None
    if not shards or tokens is None or len(parent_hash) != PREFIX_HASH_BYTES:
        return None
    return Record(
        prefix_hash=prefix_hash,
        parent_hash=parent_hash,
        token_start=int(tokens[1]),
        token_end=int(tokens[2]),
        shards=shards,
        hits=hits,
        touched_s=touched_s,
        pinned_until_s=pinned_until_s if pinned_until_s > now else 0,
    )
