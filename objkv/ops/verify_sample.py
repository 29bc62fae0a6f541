"""Some payloads, chosen by chance."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from objkv.index.shapes import is_shapes
from objkv.keys.chunk import ChunkKey
from objkv.ops.crew import Check, Unit
from objkv.ops.ends import Ends, Part, record_keys, stored_entries, stored_payloads
from objkv.ops.tally import Tally

LISTED_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Sample:
    """Payloads that stand for many."""

    keys: list[ChunkKey]
    chosen_of: int
    """About so many: a walk over an index that changes may see some twice."""


def choose_sample(
    ends: Ends, names: Sequence[str], parts: Sequence[Part], *, size: int, seed: int | None
) -> Sample:
    """``size`` payloads, each as likely as any other; walks over all records (or, without an
    index, all entries) and keeps no more than it returns."""
    chance, chosen = random.Random(seed), list[ChunkKey]()  # noqa: S311  # not a secret
    number = -1
    for number, key in enumerate(_every_key(ends, names, parts)):
        if len(chosen) < size:
            chosen.append(key)
        elif (place := chance.randrange(number + 1)) < size:
            chosen[place] = key
    return Sample(list(dict.fromkeys(chosen)), number + 1)


def unindexed(ends: Ends, parts: Sequence[Part]) -> Iterator[Unit]:
    """Of about ``LISTED_MAX`` payloads, or all if there are fewer, counts as ``unindexed`` those
    that have no record, which no sample of records has; all of them as ``listed``."""

    def work(tally: Tally, check: Check) -> None:
        for part in parts:
            for batch in stored_payloads(ends, part):
                check()
                for stored in batch:
                    tally.count("listed")
                    if stored.shard is None:
                        tally.count("unindexed", stored.entry.nbytes)
                if tally.counts["listed"] >= LISTED_MAX:
                    return

    if not ends.is_own_index:
        yield Unit("records of some", work)


def _every_key(ends: Ends, names: Sequence[str], parts: Sequence[Part]) -> Iterator[ChunkKey]:
    if ends.is_own_index:
        for part in parts:
            yield from (key for key, _ in stored_entries(ends.bulk, part) if key is not None)
        return
    for name in names:
        for record in ends.index.scan(name):
            if not is_shapes(record):
                yield from record_keys(name, record)
