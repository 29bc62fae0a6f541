"""``objkv sweep``: find and delete unreachable, expired and evicted data."""
