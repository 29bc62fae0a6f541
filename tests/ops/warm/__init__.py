"""``objkv warm``."""
