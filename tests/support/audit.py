"""Audits of small stores, and reports for tests of their display.

``audit_report.json`` is a report with something of everything: two known namespaces of two tenants
and one unknown; times, texts and numbers fit together.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.index.base import ChunkEntry, PruneIndex, ReadIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.ops.audit.audit import Audit, AuditOptions
from objkv.ops.audit.report import AuditReport
from objkv.ops.doctor.servers import ReadRules
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.walk import ReadView, Walk, find_places
from objkv.ops.runs import WorkPool
from objkv.stores.base import PruneStore, ReadStore, Unfinished
from tests.support.samples import CHUNK, CREATED_S, NAMESPACE, save, save_identity

Prompt = tuple[int, ...]
"""One number for each chunk."""


def tokens_of(prompt: Prompt) -> list[int]:
    return [number for number in prompt for _ in range(CHUNK)]


def hash_of(prompt: Prompt) -> str:
    return prefix_hashes(NAMESPACE, tokens_of(prompt), CHUNK)[-1].hex()


def save_prompts(bulk: PruneStore, index: PruneIndex | None, prompts: Sequence[Prompt]) -> None:
    save_identity(bulk)
    for prompt in prompts:
        save(bulk, index, tokens_of(prompt))


def save_with_tokens(bulk: PruneStore, index: PruneIndex, tokens: Sequence[int]) -> None:
    """Save one chunk whose payload contains its token ids."""
    save_identity(bulk)
    [prefix_hash] = prefix_hashes(NAMESPACE, tokens, CHUNK)
    parent = root_hash(NAMESPACE)
    key = ChunkKey(NAMESPACE, prefix_hash, 0)
    layers = [LayerSpec(name, "BF16", (CHUNK // 8, 2, 8, 8)) for name in ("l.0", "l.1")]
    pages = [bytes(layer.nbytes) for layer in layers]
    told = Provenance(token_digest(tokens), "host-1:4242", CREATED_S, tuple(tokens))
    claim = Claim(key, parent, 0, CHUNK)
    payload = encode(claim, layers, pages, codec="none", provenance=told)
    bulk.put_if_absent(key.path(), payload)
    chunk = ChunkEntry(NAMESPACE, prefix_hash, parent, 0, CHUNK)
    index.publish(chunk, {key.field: shard_record(read_header(payload))}, ttl_s=3_600)


def prefixes(prompts: Sequence[Prompt]) -> set[Prompt]:
    return {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}


def ways_on(chunks: set[Prompt], prompt: Prompt) -> int:
    return sum(one[:-1] == prompt for one in chunks)


class Auditor:
    """One audit whose steps can be run one by one."""

    def __init__(
        self,
        bulk: ReadStore,
        index: ReadIndex,
        *,
        is_own_index: bool = False,
        only: str | None = None,
        clock: Callable[[], float] = time.time,
        unfinished: Callable[[], Iterable[Unfinished]] = tuple,
        lifecycle: ReadRules = lambda: None,
        **options: Any,
    ) -> None:
        view = ReadView(bulk, index, is_own_index, unfinished=unfinished)
        self.inventory = Inventory(clock=clock)
        self.pool = WorkPool(workers=2)
        self.walk = Walk(view, self.inventory, find_places(view, only), 2, clock)
        self._report = Audit(self.walk, replace(OPTIONS, **options), lifecycle, clock)

    def records(self) -> None:
        self.pool.run(self.walk.records())

    def payloads(self) -> None:
        self.pool.run(self.walk.payloads(headers=self.walk.view.is_own_index))

    def again(self) -> None:
        """List leftovers and recheck suspected faults."""
        self.pool.run(self.walk.leftovers())
        self.pool.run(self.walk.second_looks())

    def report(self) -> AuditReport:
        return self._report.report()

    def all(self) -> AuditReport:
        self.records()
        self.payloads()
        self.again()
        return self.report()


OPTIONS = AuditOptions(
    version="0",
    bulk_url="file:///dev/null/kv",
    index_url="sqlite:///dev/null/i",
    ttl_s=3_600,
    grace_s=0,
    workers=2,
)


# Reports.

CHAT, CODE = "a" * 32, "b" * 32


@cache
def sample_report() -> AuditReport:
    text = Path(__file__).with_name("audit_report.json").read_text("utf-8")
    return TypeAdapter(AuditReport).validate_json(text)
