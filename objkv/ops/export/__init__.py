"""``objkv export`` and ``objkv import``: payloads with a manifest, moved between caches."""
