"""``objkv bench``: what the configured stores, index and node agent achieve from this machine."""
