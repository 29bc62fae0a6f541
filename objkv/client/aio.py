"""The asynchronous client: each call runs the synchronous client's on a thread."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from itertools import islice
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from objkv.client import client
from objkv.client.chunks import Chunks
from objkv.client.client import Client
from objkv.client.results import Chunk

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

P = ParamSpec("P")
T = TypeVar("T")
_AT_ONCE = 500
"""Chunks that one thread reads in a row."""


def open_async(
    *,
    bulk_url: str | None = None,
    index_url: str | None = None,
    config: "str | PathLike[str] | None" = None,
    tokenizer: "str | PathLike[str] | None" = None,
    **settings: Any,
) -> "AsyncClient":
    """Open the stores of a fleet for asynchronous use. Takes the arguments of ``open``.

    Makes no connection to the stores, but reads ``config`` and imports their clients. Without any
    credentials in the settings or the environment, botocore looks for those of the machine, over
    the network: call this before the event loop runs, or through ``asyncio.to_thread``.
    """
    return AsyncClient(
        client.open(
            bulk_url=bulk_url, index_url=index_url, config=config, tokenizer=tokenizer, **settings
        )
    )


def _on_thread(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    @wraps(method)
    async def call(self: "AsyncClient", /, *args: P.args, **named: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._client, *args, **named)

    return call


class AsyncClient:
    """``Client`` for asynchronous programs. An asynchronous context manager.

    Every method takes the arguments of the same method of ``Client`` and runs it on a thread of
    asyncio's pool. A cancelled call returns at once, while its thread ends by its own deadlines.
    """

    def __init__(self, inner: Client) -> None:
        self._client = inner

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<objkv.AsyncClient around {self._client!r}>"

    close = _on_thread(Client.close)
    namespaces = _on_thread(Client.namespaces)
    match = _on_thread(Client.match)
    explain = _on_thread(Client.explain)
    audit = _on_thread(Client.audit)
    pin = _on_thread(Client.pin)
    unpin = _on_thread(Client.unpin)
    pins = _on_thread(Client.pins)
    warm = _on_thread(Client.warm)

    def chunks(self, namespace: str | None = None) -> "AsyncChunks":
        """Return the chunks of one namespace or of all, for ``async for`` or as a table."""
        return AsyncChunks(self._client.chunks(namespace))


class AsyncChunks:
    """``Chunks`` for asynchronous programs."""

    def __init__(self, inner: Chunks) -> None:
        self._chunks = inner

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        left = iter(self._chunks)
        while batch := await asyncio.to_thread(lambda: list(islice(left, _AT_ONCE))):
            for chunk in batch:
                yield chunk

    async def to_pandas(self) -> "pd.DataFrame":
        """See ``Chunks.to_pandas``."""
        return await asyncio.to_thread(self._chunks.to_pandas)

    async def to_arrow(self) -> "pa.Table":
        """See ``Chunks.to_arrow``."""
        return await asyncio.to_thread(self._chunks.to_arrow)
