"""``objkv export`` and ``objkv import``: payloads with a manifest, from one place to another."""
