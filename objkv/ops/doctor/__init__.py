"""``objkv doctor`` and ``objkv access``: probes of both backends, and each role's rights."""
