"""objkv: one shared KV cache for a fleet of vLLM replicas, on Redis and an object store.

Importing this package imports neither torch nor vllm; only ``objkv.transfer`` and
``objkv.connector`` do.
"""

__version__ = "0.1.0"
