"""The public Python API, offered as ``objkv.open``."""
