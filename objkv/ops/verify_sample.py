"""Some payloads, chosen by chance."""

import random
from collections.abc import Iterator, Sequence

from objkv.index.shapes import is_shapes
from objkv.keys.chunk import ChunkKey
from objkv.ops.ends import Ends, Part, record_keys, stored_entries


def choose_sample(
    ends: Ends, names: Sequence[str], parts: Sequence[Part], *, size: int, seed: int | None
) -> list[ChunkKey]:
    """``size`` payloads, each as likely as any other; walks over all records (or, without an
    index, all entries) and keeps no more than it returns."""
    chance, chosen = random.Random(seed), list[ChunkKey]()  # noqa: S311  # not a secret
    for number, key in enumerate(_every_key(ends, names, parts)):
        if len(chosen) < size:
            chosen.append(key)
        elif (place := chance.randrange(number + 1)) < size:
            chosen[place] = key
    return list(dict.fromkeys(chosen))


def _every_key(ends: Ends, names: Sequence[str], parts: Sequence[Part]) -> Iterator[ChunkKey]:
    if ends.is_own_index:
        for part in parts:
            yield from (key for key, _ in stored_entries(ends.bulk, part) if key is not None)
        return
    for name in names:
        for record in ends.index.scan(name):
            if not is_shapes(record):
                yield from record_keys(name, record)
