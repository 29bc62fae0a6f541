"""Fills a folder and an SQLite index as a fleet does in a month, with known faults.

Payloads are whole and valid: headers are written, and pages are zeros in sparse files, so that 400
GiB take only the space of their headers. Hashes are computed from tokens, prompts share prefixes as
conversations do, and ``seed`` determines the random hits and ages.
"""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from objkv.cache.chunks import shard_record
from objkv.codec.header import digest, render
from objkv.codec.payload import Claim, LayerSpec, Provenance, read_header
from objkv.codec.values import Frame
from objkv.index.base import ChunkEntry
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity, identity_path
from objkv.keys.prefix import encode_tokens, next_hash, root_hash, token_digest
from objkv.keys.topology import Shard

CHUNK = 256
DAY_S = 86_400
TTL_S = 90 * DAY_S
_LAYERS = tuple(f"model.layers.{number}.self_attn.attn" for number in range(8))
_TEXT = (
    "you are a careful assistant of acme answer in plain words cite the manual and ask when "
    "something is not clear the customer writes about an order that has arrived late please check "
    "stock price delivery invoice say what comes next do promise no dates"
)
_WORDS = tuple(dict.fromkeys(_TEXT.split()))


@dataclass(frozen=True, slots=True)
class Faults:
    """How many of each to plant."""

    orphan: int = 40
    expired: int = 60
    ghost: int = 25
    stranger: int = 30
    corrupt: int = 5
    quarantined: int = 4


@dataclass(slots=True)
class _Prompt:
    """One way through a tree: its chunks' hashes and where it may go on."""

    hashes: list[bytes]
    born_s: float


@dataclass
class StoreMaker:
    """Makes one store. ``chunks``: of good ones, about."""

    folder: Path
    chunks: int
    now_s: float
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    planted: dict[str, int] = field(default_factory=dict)
    _frames: dict[int, list[Frame]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)  # not a secret
        self._clock_s = self.now_s
        self._bulk = self.folder / "chunks"
        self._index = SqliteIndex(self.folder / "index.sqlite", clock=lambda: self._clock_s)

    def make(self) -> dict[str, int]:
        """Fill it; how many there are of what. About 4 minutes for 100,000 chunks on two cores."""
        self._write_tokenizer()
        shares = ((0.42, 0), (0.2, 1), (0.18, 2), (0.14, 3), (0.06, 4))
        for share, number in shares:
            self._fill(self._identity(number), int(share * self.chunks), texts=number == 0)
        self._plant_faults()
        self._index.close()
        return dict(sorted(self.planted.items()))

    def _identity(self, number: int) -> Identity:
        group = GroupIdentity("full", None, _LAYERS, heads=8, content=256, block_size=16)
        chat = Identity(
            model="acme/chat-8b",
            weights="5f3c" * 4,
            quantization=None,
            kv_dtype="bfloat16",
            groups=(group,),
            page_layout="canonical",
            chunk_tokens=CHUNK,
            weights_epoch=1,
            tenant="search",
        )
        return (
            chat,
            replace(chat, tenant="assistant"),
            replace(chat, model="acme/code-32b", weights="77aa" * 4, tenant="search"),
            replace(chat, model="acme/code-32b", weights="77aa" * 4, kv_dtype="fp8_e4m3"),
            replace(chat, weights_epoch=0),
        )[number]

    def _fill(self, identity: Identity, chunks: int, *, texts: bool) -> None:
        namespace = identity.namespace()
        self._put(identity_path(namespace), identity.canonical(), self.now_s - 31 * DAY_S)
        shards = (Shard(0, 8, 0, 4), Shard(0, 8, 4, 8)) if "32b" in identity.model else ()
        made, prompts = 0, list[_Prompt]()
        while made < chunks:
            old = self._parent(prompts)
            born_s = self.now_s - 30 * DAY_S * (1 - made / chunks) * self._chance.uniform(0.95, 1)
            length = self._chance.choice((1, 1, 2, 3, 5, 8, 13)) if old else 4 + made % 21
            if not old and self._chance.random() < 0.02:
                length = 200  # a document
            prompt = _Prompt(list(old.hashes) if old else [], born_s)
            for _ in range(min(length, chunks - made)):
                self._save(namespace, prompt, shards or (Shard(0, 8, 0, 8),), texts=texts)
                made += 1
            prompts.append(prompt)
        self._use(namespace, prompts)

    def _parent(self, prompts: Sequence[_Prompt]) -> _Prompt | None:
        """What a new prompt begins with: nothing, or the beginning of an earlier one. The first
        ones are the system prompts that most begin with."""
        if len(prompts) < 6 or self._chance.random() < 0.01:
            return None
        place = int(len(prompts) * self._chance.random() ** 3)
        old = prompts[place]
        keep = len(old.hashes) - (self._chance.randrange(3) if self._chance.random() < 0.4 else 0)
        return _Prompt(old.hashes[: max(1, keep)], old.born_s)

    def _tokens(self, *, texts: bool) -> list[int]:
        most = len(_WORDS) + 1 if texts else 1 << 17
        return [self._chance.randrange(most) for _ in range(CHUNK)]

    def _save(
        self, namespace: str, prompt: _Prompt, shards: Sequence[Shard], *, texts: bool
    ) -> list[ChunkKey]:
        tokens = self._tokens(texts=texts)
        parent = prompt.hashes[-1] if prompt.hashes else root_hash(namespace)
        prefix_hash = next_hash(parent, encode_tokens(tokens))
        start = len(prompt.hashes) * CHUNK
        chunk = ChunkEntry(namespace, prefix_hash, parent, start, start + CHUNK)
        kept = tuple(tokens) if texts else None
        records = {}
        for shard in shards:
            key = ChunkKey(namespace, prefix_hash, 0, shard)
            header = self._header(Claim(key, parent, start, start + CHUNK), kept, tokens, prompt)
            nbytes = read_header(header).nbytes
            self._put(key.path(), header, prompt.born_s, nbytes)
            records[key.field] = shard_record(read_header(header))
        self._clock_s = prompt.born_s
        self._index.publish(chunk, records, ttl_s=TTL_S)
        prompt.hashes.append(prefix_hash)
        self._count("good", 1)
        return [ChunkKey(namespace, prefix_hash, 0, shard) for shard in shards]

    def _header(
        self, claim: Claim, kept: tuple[int, ...] | None, tokens: Sequence[int], prompt: _Prompt
    ) -> bytes:
        shard = claim.key.shard
        heads = shard.head_end - shard.head_start
        if heads not in self._frames:
            self._frames[heads] = _frames(heads)
        frames = self._frames[heads]
        digest_hex = token_digest(tokens)
        provenance = Provenance(digest_hex, "replica-3:4242", int(prompt.born_s), kept)
        return render(claim, frames, provenance)

    def _use(self, namespace: str, prompts: Sequence[_Prompt]) -> None:
        for _ in range(len(prompts)):
            prompt = prompts[int(len(prompts) * self._chance.random() ** 4)]
            reach = self._chance.randrange(1, len(prompt.hashes) + 1)
            self._clock_s = self._chance.uniform(prompt.born_s, self.now_s)
            self._index.touch(namespace, prompt.hashes[:reach], ttl_s=TTL_S)

    def _plant_faults(self) -> None:
        namespace = self._identity(0).namespace()
        whole = (Shard(0, 8, 0, 8),)
        faults = self.faults
        old, young = self.now_s - TTL_S - DAY_S, self.now_s - 2 * DAY_S
        for kind, count, born_s in (
            ("orphan", faults.orphan, young),
            ("expired", faults.expired, old),
            ("ghost", faults.ghost, young),
            ("corrupt", faults.corrupt, young),
            ("stranger", faults.stranger, young),
        ):
            for _ in range(count):
                name = "5" * 32 if kind == "stranger" else namespace
                [key] = self._save(name, _Prompt([], born_s), whole, texts=False)
                self.planted["good"] -= 1
                self._spoil(kind, key)
                self._count(kind, 1)
        for number in range(faults.quarantined):
            self._put(f"quarantine/{namespace}/{number:02x}", b"?" * 5_000, young)
            self._count("leftover", 1)

    def _spoil(self, kind: str, key: ChunkKey) -> None:
        file = self._bulk / key.path()
        if kind in ("orphan", "expired", "stranger"):
            self._index.drop(key.namespace, key.prefix_hash)
        elif kind == "ghost":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size - 1)

    def _put(self, path: str, value: bytes, born_s: float, nbytes: int | None = None) -> None:
        file = self._bulk / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)
        if nbytes is not None:
            os.truncate(file, nbytes)
        os.utime(file, (born_s, born_s))

    def _count(self, kind: str, count: int) -> None:
        self.planted[kind] = self.planted.get(kind, 0) + count

    def _write_tokenizer(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        vocabulary = {word: number for number, word in enumerate(("<unk>", *_WORDS))}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
        document: dict[str, object] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": model,
        }
        (self.folder / "tokenizer.json").write_text(json.dumps(document))


def _frames(heads: int) -> list[Frame]:
    """Of pages that are zeros, uncompressed; offsets count from the first frame."""
    frames, offset = [], 0
    for name in _LAYERS:
        layer = LayerSpec(name, "BF16", (CHUNK // 16, heads, 16, 256))
        checksum = digest(bytes(layer.nbytes))
        frames.append(Frame(layer, "none", offset, layer.nbytes, checksum, checksum))
        offset += layer.nbytes
    return frames
