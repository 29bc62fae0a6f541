"""The faults of a soak and their repair: servers that die, stores that refuse, and stored bytes
that change."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak_life import Life
from benchmarks.soak_prompts import Documents, payload_paths
from benchmarks.soak_shared import FaultCycle
from objkv.errors import StoreUnavailable
from objkv.stores.base import PruneStore
from objkv.testing.flaky import FlakyStore
from tests.support.servers.redis import RedisServer

RETIRED_AT_ONCE = 2


@dataclass(frozen=True)
class Targets:
    """What can be made to fail."""

    lives: Sequence[Life]
    documents: Documents
    redis: RedisServer
    bulk: PruneStore
    """The place itself, past all wrappers."""


class Faults(FaultCycle):
    """Faults of stores, an index and a Redis; documents that nobody asks for any more."""

    def __init__(self, targets: Targets, seed: int) -> None:
        super().__init__(targets.redis, targets.bulk, seed)
        self._targets = targets
        self._kinds |= {
            "store refuses once": self._fail_once,
            "store is down": self._take_down,
            "store hangs": self._hang,
            "bits flip on the way": self._flip_read,
            "reads are cut short": self._cut_short,
            "index refuses some": self._refuse_index,
            "documents change": self._replace_documents,
        }

    def _fail_once(self) -> None:
        life = self._random.choice(self._targets.lives)
        for store in (life.replica.bulk, life.replica.hot):
            store.fail_next(_refusal(), times=self._random.randint(1, 5))

    def _take_down(self) -> None:
        store = self._some_store()
        store.fail_until_mended(_refusal())
        self._mend = store.mend

    def _hang(self) -> None:
        store, gate = self._some_store(), threading.Event()
        store.hold(gate)

        def mend() -> None:
            store.mend()
            gate.set()

        self._mend = mend

    def _flip_read(self) -> None:
        store = self._some_store()
        store.flip_bit(self._random.randrange(1 << 24))
        self._mend = store.mend

    def _cut_short(self) -> None:
        store = self._some_store()
        store.truncate(self._random.randrange(1 << 17))
        self._mend = store.mend

    def _refuse_index(self) -> None:
        index = self._random.choice(self._targets.lives).replica.index
        index.share = self._random.choice((0.2, 1.0))

        def mend() -> None:
            index.share = 0.0

        self._mend = mend

    def _replace_documents(self) -> None:
        for _ in range(RETIRED_AT_ONCE):
            old = self._targets.documents.replace_one()
            kept = set(self._paths())
            for path in old:
                if path not in kept:
                    self._targets.bulk.delete(path)

    def _paths(self) -> list[str]:
        return [p for prompt in self._targets.documents.prompts for p in payload_paths(prompt)]

    def _some_store(self) -> FlakyStore:
        replica = self._random.choice(self._targets.lives).replica
        return self._random.choice((replica.bulk, replica.bulk, replica.hot))


def _refusal() -> StoreUnavailable:
    """A new one for each fault: what is raised often collects every frame it passed through."""
    return StoreUnavailable("refused, as the soak wants it")
