"""The chunks of the index, one by one or as a table."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from objkv.client.results import Chunk
from objkv.errors import ConfigError, pip_install
from objkv.index.base import ReadIndex, Record

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ARROW_TYPES = {str: "string", int: "int64", bool: "bool"}
_PANDAS_TYPES = {str: "str", int: "int64", bool: "bool"}


class Chunks:
    """Every chunk of some namespaces, in no order.

    Each iteration and each table reads the index again. An iteration needs about 100 bytes of
    memory per chunk, and a table about 1 KiB. Chunks that are saved or deleted meanwhile may be
    missing.
    """

    def __init__(self, index: ReadIndex, names: Callable[[], list[str]]) -> None:
        self._index = index
        self._names = names

    def __iter__(self) -> Iterator[Chunk]:
        for name in self._names():
            seen = set()
            for record in self._index.scan(name):
                # A scan may repeat records.
                if record.shards and record.prefix_hash not in seen:
                    seen.add(record.prefix_hash)
                    yield _chunk(name, record)

    def __repr__(self) -> str:
        return f"<Chunks of {self._index!r}>"

    def to_pandas(self) -> "pd.DataFrame":
        """Return a DataFrame with a column for each field of ``Chunk``.

        Raises ``ConfigError`` if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ConfigError(
                f"to_pandas needs a library that is not installed: {pip_install('notebook')}"
            ) from None
        return pd.DataFrame(
            {
                name: pd.Series(values, dtype=_PANDAS_TYPES[kind])
                for name, kind, values in self._columns()
            }
        )

    def to_arrow(self) -> "pa.Table":
        """Return an Arrow table with a column for each field of ``Chunk``.

        Raises ``ConfigError`` if pyarrow is not installed.
        """
        try:
            import pyarrow as pa
        except ImportError:
            raise ConfigError(
                "to_arrow needs a library that is not installed: pip install pyarrow"
            ) from None
        return pa.table(
            {
                name: pa.array(values, type=_ARROW_TYPES[kind])
                for name, kind, values in self._columns()
            }
        )

    def _columns(self) -> Iterator[tuple[str, type, list[Any]]]:
        every = [(field.name, field.type) for field in fields(Chunk)]
        columns: list[list[Any]] = [[] for _ in every]
        for chunk in self:
            for (name, _), column in zip(every, columns, strict=True):
                column.append(getattr(chunk, name))
        for (name, kind), column in zip(every, columns, strict=True):
            assert isinstance(kind, type)
            yield name, kind, column


def _chunk(namespace: str, record: Record) -> Chunk:
    shards = record.shards.values()
    return Chunk(
        namespace=namespace,
        prefix_hash=record.prefix_hash.hex(),
        parent_hash=record.parent_hash.hex(),
        token_start=record.token_start,
        token_end=record.token_end,
        payloads=len(shards),
        nbytes=record.nbytes,
        raw_bytes=sum(shard.raw_bytes for shard in shards),
        hot=all(shard.hot for shard in shards),
        hits=record.hits,
        created_s=max(shard.created_s for shard in shards),
        touched_s=record.touched_s,
        pinned_until_s=record.pinned_until_s,
    )
