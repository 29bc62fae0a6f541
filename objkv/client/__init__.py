"""The public Python API, offered as ``objkv.open`` and ``objkv.open_async``."""
