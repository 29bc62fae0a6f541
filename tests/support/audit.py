"""Audits of small stores, and reports for tests of their display.

``audit_report.json`` is a report with something of everything: two known namespaces of two tenants
and one unknown; times, texts and numbers fit together.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from objkv.config import load_config
from objkv.config.prices import LIST_PRICES
from objkv.index.base import PruneIndex
from objkv.keys.prefix import prefix_hashes
from objkv.ops.audit.audit import make_report
from objkv.ops.audit.report import AuditReport
from objkv.ops.doctor.servers import ReadRules
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.walk import Walk, find_scope
from objkv.ops.runs import WorkPool
from objkv.stores.base import PruneStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import CHUNK, NAMESPACE, save, save_identity, view_of

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


def stored(prompts: Sequence[Prompt]) -> tuple[MemoryStore, MemoryIndex]:
    """Both ends, with these prompts."""
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, prompts)
    return bulk, index


def prefixes(prompts: Sequence[Prompt]) -> set[Prompt]:
    return {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}


def ways_on(chunks: set[Prompt], prompt: Prompt) -> int:
    return sum(one[:-1] == prompt for one in chunks)


class Auditor:
    def __init__(
        self,
        bulk: PruneStore,
        index: PruneIndex,
        *,
        is_own_index: bool = False,
        only: str | None = None,
        clock: Callable[[], float] = time.time,
        lifecycle: ReadRules = lambda: None,
        **options: Any,
    ) -> None:
        view = view_of(bulk, index, is_own_index=is_own_index)
        self.inventory = Inventory(clock=clock)
        self.pool = WorkPool(workers=2)
        self.walk = Walk(view, self.inventory, find_scope(view, only), 2, clock)
        prices = options.pop("prices", LIST_PRICES)
        config = load_config(SETTINGS | options)
        self._make = partial(
            make_report, self.walk, config, version="0", prices=prices, lifecycle=lifecycle,
            clock=clock,
        )  # fmt: skip

    def records(self) -> None:
        self.pool.run(self.walk.records())

    def payloads(self) -> None:
        self.pool.run(self.walk.payloads(headers=self.walk.view.is_own_index))

    def again(self) -> None:
        self.pool.run((*self.walk.leftovers(), *self.walk.pins()))
        self.pool.run(self.walk.second_looks())

    def report(self) -> AuditReport:
        return self._make()

    def all(self) -> AuditReport:
        self.records()
        self.payloads()
        self.again()
        return self.report()


SETTINGS = {
    "bulk_url": "file:///dev/null/kv",
    "index_url": "sqlite:///dev/null/i",
    "ttl_s": 3_600,
    "sweep_grace_s": 0,
    "quota_bytes": 0,
}


@cache
def sample_report() -> AuditReport:
    document = json.loads(Path(__file__).with_name("audit_report.json").read_text("utf-8"))
    return TypeAdapter(AuditReport).validate_python(document)
