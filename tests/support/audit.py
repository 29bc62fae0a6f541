"""Audits of small stores, and reports for tests of their display.

``audit_report.json`` is a report with something of everything: two known namespaces of two tenants
and one unknown; times, texts and numbers fit together.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.index.base import ChunkEntry, PruneIndex, ReadIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.ops.audit.audit import Audit, AuditOptions, find_places
from objkv.ops.audit.report import (
    AgeBucket,
    AgesAudit,
    AuditReport,
    DepthAudit,
    GrowthAudit,
    GrowthDay,
    NamespaceAudit,
    RootAudit,
    TenantAudit,
    TreeNode,
)
from objkv.ops.audit.spool import AuditSpool
from objkv.ops.audit.walk import AuditView, AuditWalk
from objkv.ops.runs import Checkpoint, Unit, WorkPool
from objkv.stores.base import PruneStore, ReadStore
from tests.support.samples import CHUNK, CREATED_S, NAMESPACE, WHOLE, record_of, save, save_identity

Prompt = tuple[int, ...]
"""One number for each chunk."""


def tokens_of(prompt: Prompt) -> list[int]:
    """Return tokens for these chunks; a chunk repeats one token."""
    return [number for number in prompt for _ in range(CHUNK)]


def hash_of(prompt: Prompt) -> str:
    """Return the prefix hash of the prompt's last chunk."""
    return prefix_hashes(NAMESPACE, tokens_of(prompt), CHUNK)[-1].hex()


def save_prompts(bulk: PruneStore, index: PruneIndex | None, prompts: Sequence[Prompt]) -> None:
    """Save prompts as replicas do."""
    save_identity(bulk)
    for prompt in prompts:
        save(bulk, index, tokens_of(prompt))


def save_with_tokens(bulk: PruneStore, index: PruneIndex, tokens: Sequence[int]) -> None:
    """Save one chunk whose payload contains its token ids."""
    save_identity(bulk)
    [prefix_hash] = prefix_hashes(NAMESPACE, tokens, CHUNK)
    parent = root_hash(NAMESPACE)
    key = ChunkKey(NAMESPACE, prefix_hash, 0, WHOLE)
    layers = [LayerSpec(name, "BF16", (CHUNK // 8, 2, 8, 8)) for name in ("l.0", "l.1")]
    pages = [bytes(layer.nbytes) for layer in layers]
    told = Provenance(token_digest(tokens), "host-1:4242", CREATED_S, tuple(tokens))
    claim = Claim(key, parent, 0, CHUNK)
    payload = encode(claim, layers, pages, codec="none", provenance=told)
    bulk.put_if_absent(key.path(), payload)
    chunk = ChunkEntry(NAMESPACE, prefix_hash, parent, 0, CHUNK)
    index.publish(chunk, {key.field: record_of(read_header(payload))}, ttl_s=3_600)


def prefixes(prompts: Sequence[Prompt]) -> set[Prompt]:
    """Return the chunks of these prompts, each as its path from the root."""
    return {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}


def ways_on(chunks: set[Prompt], prompt: Prompt) -> int:
    """Return the number of chunks that continue ``prompt``."""
    return sum(one[:-1] == prompt for one in chunks)


class Auditor:
    """One audit whose steps can be run one by one."""

    def __init__(
        self,
        bulk: ReadStore,
        index: ReadIndex,
        *,
        spool: AuditSpool | None = None,
        is_own_index: bool = False,
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> None:
        self.view = AuditView(bulk, index, is_own_index)
        self.spool = spool or AuditSpool(None, clock=clock or time.time)
        self.pool = WorkPool(Checkpoint(None), workers=2)
        self.walk = AuditWalk(self.view, self.spool, 2)
        self.options = replace(OPTIONS, **options)
        self.clock = clock
        self.places = find_places(self.view)

    def records(self) -> None:
        """Read the index."""
        self._run(self.walk.records(self.places.indexed, self.places.totals))

    def payloads(self) -> None:
        """List the bulk store."""
        namespaces = {name: one.namespace for name, one in self.places.facts.items()}
        self._run(self.walk.payloads(self.places.parts, namespaces))

    def again(self) -> None:
        """List leftovers and recheck suspected faults."""
        self._run(self.walk.leftovers(self.places.only))
        if not self.view.is_own_index:
            self._run(self.walk.second_looks([*self.places.facts, *self.places.indexed]))

    def report(self) -> AuditReport:
        """Return the report of the parts read so far."""
        ending = self.pool.ending
        assert ending != "limit"
        more = {} if self.clock is None else {"clock": self.clock}
        return Audit(self.view, self.spool, self.places, self.options, **more).report(
            ending, self.walk.problems
        )

    def all(self) -> AuditReport:
        """Run all steps and return the report."""
        self.records()
        self.payloads()
        self.again()
        return self.report()

    def _run(self, units: Iterator[Unit]) -> None:
        self.pool.run(unit for unit in units if unit.again or unit.name not in self.spool.done)


OPTIONS = AuditOptions(
    version="0", bulk_url="memory:", index_url="memory:", ttl_s=3_600, grace_s=0, workers=2
)


# Reports.

MADE_S = 1_795_300_000
"""2026-11-21 22:26:40 UTC."""
CHAT, CODE = "a" * 32, "b" * 32
_MIB = 1 << 20
_DAY_S = 86_400
MODELS = ("acme/chat-70b", "acme/chat-8b", "acme/code-32b", "acme/embed-1b")
TENANTS = ("search", "support", "batch", "research")
TEXTS = (
    "You are the support assistant of ACME. Answer in the user's language …",
    "Review the following pull request. Repository: …",
    "Contract 2026-118, all pages. Question: …",
)


@cache
def sample_report() -> AuditReport:
    """Return the report in ``audit_report.json``."""
    text = Path(__file__).with_name("audit_report.json").read_text("utf-8")
    return TypeAdapter(AuditReport).validate_json(text)


def large_report(*, namespaces: int = 500, nodes: int = 2_000, seed: int = 7) -> AuditReport:
    """Return a report of the largest size: the sample with all its lists replaced by long ones."""
    chance = random.Random(seed)
    names = [f"{chance.getrandbits(128):032x}" for _ in range(namespaces)]
    tree = _tree(chance, names[: max(1, namespaces // 60)], nodes)
    spaces = tuple(_namespace(chance, number, name) for number, name in enumerate(names))
    small = sample_report()
    return replace(
        small,
        totals=replace(
            small.totals,
            namespaces=namespaces,
            tenants=len(TENANTS),
            chunks=sum(one.chunks for one in spaces),
            nbytes=sum(one.nbytes for one in spaces),
        ),
        namespaces=spaces,
        tenants=tuple(_tenant(name, spaces) for name in TENANTS),
        tree=tree,
        roots=tuple(_root(node) for node in tree if node.parent is None),
        depths=tuple(_depth(names[0], depth) for depth in range(40)),
        growth=_growth(chance),
        ages=_ages(),
        problems=(),
    )


def _namespace(chance: random.Random, number: int, name: str) -> NamespaceAudit:
    known = sample_report().namespaces[0]
    chunks = max(1, int(40_000 / (number + 1)))
    nbytes = chunks * chance.randint(1, 4) * _MIB
    used = int(chunks * chance.random())
    return replace(
        known,
        namespace=name,
        model=MODELS[number % len(MODELS)],
        tenant=TENANTS[number % len(TENANTS)],
        chunks=chunks,
        payloads=2 * chunks,
        tokens=256 * chunks,
        roots=max(1, chunks // 90),
        nbytes=nbytes,
        hits=used * chance.randint(1, 60),
        used_chunks=used,
        unused_bytes=nbytes * (chunks - used) // chunks,
        ghosts=0,
        orphans=0,
        corrupt=0,
        strangers=0,
        expired=0,
    )


def _tenant(name: str, spaces: tuple[NamespaceAudit, ...]) -> TenantAudit:
    own = [one for one in spaces if one.tenant == name]
    return replace(
        sample_report().tenants[0],
        tenant=name,
        namespaces=len(own),
        chunks=sum(one.chunks for one in own),
        nbytes=sum(one.nbytes for one in own),
        hits=sum(one.hits or 0 for one in own),
        used_chunks=sum(one.used_chunks or 0 for one in own),
    )


def _tree(chance: random.Random, names: list[str], nodes: int) -> tuple[TreeNode, ...]:
    found: list[TreeNode] = []
    open_ends: list[int] = []
    while len(found) < nodes:
        number = len(found)
        is_root = not open_ends or (number < nodes // 20 and chance.random() < 0.3)
        up = None if is_root else found[chance.choice(open_ends[-60:])]
        depth = 0 if up is None else up.depth + up.chunks
        chunks = chance.choice((1, 2, 4, 8, 16)) if depth < 60 else 1
        hits = int(2 ** (chance.random() * 11)) if depth < 20 else int(chance.random() * 8)
        home = names[min(int(chance.expovariate(0.9)), len(names) - 1)]
        found.append(
            replace(
                sample_report().tree[0],
                id=number,
                parent=None if up is None else up.id,
                namespace=home if up is None else up.namespace,
                hash=f"{chance.getrandbits(160):040x}",
                depth=depth,
                token_start=256 * depth,
                token_end=256 * (depth + chunks),
                chunks=chunks,
                nbytes=chunks * 4 * _MIB,
                hits=hits * chunks,
                hits_max=hits,
                last_used_s=None if not hits else MADE_S - int(chance.expovariate(1e-5)),
                leaves=1,
                children=0,
                label=None,
                text=chance.choice(TEXTS) if up is None else None,
            )
        )
        open_ends.append(number)
    return tuple(found)


def _root(node: TreeNode) -> RootAudit:
    return replace(
        sample_report().roots[0],
        namespace=node.namespace,
        hash=node.hash,
        token_start=0,
        token_end_max=node.token_end + 4_096,
        chunks=node.chunks,
        nbytes=node.nbytes,
        hits=node.hits,
        label=node.text,
    )


def _depth(namespace: str, depth: int) -> DepthAudit:
    chunks = 2_400 // (depth + 1) + 40
    return DepthAudit(
        namespace, depth, depth + 1, chunks, 256 * chunks, chunks * _MIB, 9_000 // (depth + 1),
        int(chunks * 0.9 ** (depth / 2)), depth % 7, 3,
    )  # fmt: skip


def _growth(chance: random.Random) -> GrowthAudit:
    days = [
        GrowthDay(f"2026-{9 + day // 30:02}-{day % 30 + 1:02}", 90 + day, 180 + 2 * day,
                  int((40 + 2 * day) * (0.6 + chance.random()) * 1024 * _MIB))
        for day in range(80)
    ]  # fmt: skip
    return GrowthAudit(tuple(days), None, 160.0 * 1024 * _MIB, 5_000.0)


def _ages() -> AgesAudit:
    limits = (0, 3_600, 6 * 3_600, _DAY_S, 3 * _DAY_S, 7 * _DAY_S, 30 * _DAY_S)
    ends = (*limits[1:], None)
    written = (40, 180, 420, 900, 1_500, 4_100, 800)
    used = (1_900, 1_200, 700, 600, 300, 90, 0)
    both = [
        tuple(
            AgeBucket(start, end, 10 * size, size * 1024 * _MIB)
            for start, end, size in zip(limits, ends, sizes, strict=True)
        )
        for sizes in (written, used)
    ]
    return AgesAudit(both[0], both[1], 31_500, 3_150 * 1024 * _MIB)
