"""objkv: one shared KV cache for a fleet of vLLM replicas, on Redis and an object store.

Importing this package imports neither torch nor vllm; only ``objkv.transfer`` and
``objkv.connector`` do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from objkv.assembly.warming import warm

__all__ = ["__version__", "warm"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # ``warm`` needs the stores and the index, which are imported at its first use.
    if name == "warm":
        return import_module("objkv.assembly.warming").warm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
