"""Lua scripts that Redis runs atomically. Each touches one key, or a chunk's record and a lease,
which a cluster keeps in the same place.

Scripts are sent by digest. A server without the script gets its text with ``EVAL``, which also
caches it. ``redis.pcall`` returns a table if a key has another type, and so is not objkv's. Such a
key is treated as absent, and replaced when a chunk is published.
"""

import hashlib
from dataclasses import dataclass, field

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """One script and its digest."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        # Redis identifies scripts by SHA-1; its collision resistance does not matter here.
        digest = hashlib.sha1(self.text.encode("ascii"), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)

    def known(self, keys: Keys, *args: str | bytes | int) -> tuple[str | bytes | int, ...]:
        """Return the command for a server that has the script cached."""
        return ("EVALSHA", self.sha, len(keys), *keys, *args)

    def full(self, keys: Keys, *args: str | bytes | int) -> tuple[str | bytes | int, ...]:
        """Return the command for any server."""
        return ("EVAL", self.text, len(keys), *keys, *args)


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

SIGHT = Script("""\
if redis.call('SET', KEYS[1], '', 'NX', 'PX', ARGV[1]) then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
""")
"""ARGV: time to live in ms. Returns whether the key existed."""

RELEASE = Script("""\
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
""")
"""ARGV: owner."""
