"""objkv: one shared KV cache for a fleet of vLLM replicas, on Redis and an object store.

Importing this package imports neither torch nor vllm; only ``objkv.transfer``,
``objkv.connector`` and ``objkv.programs`` do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from objkv.errors import (
    ConfigError,
    NotStored,
    ObjkvError,
    PayloadError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    UnclearName,
)

if TYPE_CHECKING:
    from objkv.client.client import Client, open
    from objkv.client.results import Chunk, Match, Namespace
    from objkv.ops.audit.report import AuditReport
    from objkv.ops.pin import PinnedPrefix
    from objkv.ops.warm.run import WarmReport

__all__ = [
    "AuditReport",
    "Chunk",
    "Client",
    "ConfigError",
    "Match",
    "Namespace",
    "NotStored",
    "ObjkvError",
    "PayloadError",
    "PinnedPrefix",
    "StoreDenied",
    "StoreError",
    "StoreUnavailable",
    "UnclearName",
    "WarmReport",
    "__version__",
    "open",
]

__version__ = "0.2.0.dev0"

_PLACES = {
    "objkv.client.client": ("Client", "open"),
    "objkv.client.results": ("Chunk", "Match", "Namespace"),
    "objkv.ops.audit.report": ("AuditReport",),
    "objkv.ops.pin": ("PinnedPrefix",),
    "objkv.ops.warm.run": ("WarmReport",),
}
"""The module of each other name. It is imported at the name's first use, which takes a second."""


if not TYPE_CHECKING:  # a name that does not exist is an error for type checkers

    def __getattr__(name: str) -> Any:
        for module, names in _PLACES.items():
            if name in names:
                found = globals()[name] = getattr(import_module(module), name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
