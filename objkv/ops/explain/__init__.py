"""``objkv match --explain``: why a prompt's prefix is or is not stored."""
