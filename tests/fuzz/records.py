"""Targets: what an index, a bucket's documents and names of keys say."""

import hashlib
import json
import posixpath
from random import Random

from objkv.cache.bulk_index import BulkIndex
from objkv.cache.pins import Pin, parse_pin
from objkv.errors import ConfigError, PayloadError, StoreError
from objkv.index.base import Record
from objkv.index.fields import decode_shard, encode_shard
from objkv.index.redis.index import _record
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import canonical_json, identity_path
from objkv.ops.backends_view import parse_identity
from objkv.ops.diff import diff, parse_document
from objkv.stores.base import check_key, check_prefix, is_key
from tests.codec.payloads import CLAIM
from tests.contracts.index_contract import shard
from tests.contracts.memory_store import MemoryStore
from tests.fuzz.mutation import change_document, changed_text, spoiled, text
from tests.fuzz.payloads import whole_payload
from tests.fuzz.target import Finding, Target, outcome, require
from tests.support.samples import IDENTITY

_SHARDS = [encode_shard(shard(nbytes)) for nbytes in (1, 4096, 10**17)]
_PATH = CLAIM.key.path()
_PIN = Pin("ab" * 16, (b"\1" * 20, b"\2" * 20), 512, 1_800_000_000, 1_700_000_000)


def _shard(value: bytes) -> str:
    """There is one way to write a shard record, and no other is read."""
    found = decode_shard(value)
    if found is None:
        return "refused"
    require(encode_shard(found) == value, "another way to write it")
    return "read"


def _some_reply(random: Random) -> dict[bytes, bytes]:
    """What ``HGETALL`` may answer."""
    fields = [b"0.L0-2_H0-4", b"p", b"t", b"h", b"u", b"pin", b"0", b"x.L"]
    values = [
        *_SHARDS, b"\1" * 20, b"0-256", b"256-512", b"0", b"7", b"-1", b"", b"1e9", b"9" * 5000,
        b"\xd9\xa3", b" 1", b"1_0", b"0-0", b"nan",
    ]  # fmt: skip
    reply = dict(zip(fields, (_SHARDS[1], b"\1" * 20, b"0-256", b"3", b"1700000000"), strict=False))
    for _ in range(random.randrange(5)):
        name = random.choice([*fields, random.randbytes(random.randrange(12))])
        reply[name] = spoiled(random, values)
    for field in random.sample(fields, random.randrange(3)):
        reply.pop(field, None)
    return reply


@outcome(StoreError)
def _reply(reply: dict[bytes, bytes]) -> str:
    record = _record(b"\1" * 20, reply, 0.0)
    if record is None:
        return "refused"
    require(isinstance(record, Record), "no record")
    require(len(record.parent_hash) == 20, "a parent of another length")
    require(record.shards, "no shards")
    repr(record)
    return "read"


@outcome((ValueError, StoreError))
def _key(name: str) -> str:
    """No name leads out of a store, and what is read as a key is written as it was."""
    if is_key(name):
        require(posixpath.normpath(f"/root/{name}") == f"/root/{name}", "a way out")
        require(name.isascii(), "letters of others")
        check_key(name)
    key = ChunkKey.parse(name)
    require(key.path() == name, "written otherwise")
    require(is_key(name), "a path that is no key")
    require(ChunkKey.read(key.chunk_text, str(key.shard or "")) == key, "read otherwise")
    return "read"


@outcome(StoreError)
def _prefix(name: str) -> str:
    check_prefix(name)
    require(posixpath.normpath(f"/root/{name}x").startswith("/root/"), "a way out")
    return "read"


def _some_identity(random: Random) -> tuple[bytes, str]:
    """A document, and the namespace that its digest would be."""
    document = json.loads(IDENTITY.canonical())
    change_document(random, document)
    try:
        written = canonical_json(document)
    except ValueError:
        written = json.dumps(document).encode()
    if random.random() < 0.5:
        written = spoiled(random, [written])
    return written, hashlib.sha256(written).hexdigest()[:32]


@outcome(PayloadError)
def _identity(example: tuple[bytes, str]) -> str:
    document, namespace = example
    identity = parse_identity(document, namespace)
    require(identity.namespace() == namespace, "of another namespace")
    require(json.loads(identity.canonical()) == json.loads(document), "another document")
    return "read"


@outcome((ConfigError, PayloadError))
def _diff(example: tuple[bytes, str]) -> str:
    document = parse_document(example[0].decode("utf-8", "replace"), "it")
    report = diff(document, json.loads(IDENTITY.canonical()))
    repr(report)
    return "same" if report.share else "read"


@outcome(PayloadError)
def _pin(document: bytes) -> str:
    pin = parse_pin(document, _PIN.path())
    require(parse_pin(pin.document(), _PIN.path()) == pin, "written otherwise")
    require(pin.path() == _PIN.path(), "of another prefix")
    return "read"


def _folder(payload: bytes) -> str:
    """A folder that is its own index leaves out what is no payload."""
    store = MemoryStore()
    store.put(_PATH, payload)
    store.put(identity_path(CLAIM.key.namespace), payload)
    index = BulkIndex(store)
    [record] = index.lookup(CLAIM.key.namespace, [CLAIM.key.prefix_hash])
    if record is None:
        return "refused"
    if list(index.scan(CLAIM.key.namespace)) != [record]:
        raise Finding("scan and lookup differ")
    return "read"


def _some_key(random: Random) -> str:
    if random.random() < 0.5:
        return changed_text(random, random.choice((_PATH, "a/b.c/..d")))
    return spoiled(random, [_PATH.encode(), b"a/b.c/..d"]).decode("latin-1")


def _some_prefix(random: Random) -> str:
    is_near = random.random() < 0.5
    return changed_text(random, _PATH[:40]) if is_near else text(random, "ab./~\n")


TARGETS = (
    Target("shard record", lambda random: spoiled(random, _SHARDS), _shard),
    Target("Redis record", _some_reply, _reply),
    Target("key", _some_key, _key),
    Target("prefix", _some_prefix, _prefix),
    Target("identity document", _some_identity, _identity),
    Target("identity documents compared", _some_identity, _diff),
    Target("pin", lambda random: spoiled(random, [_PIN.document()]), _pin),
    Target("folder as index", whole_payload, _folder),
)
