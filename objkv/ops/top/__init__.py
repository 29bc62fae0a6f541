"""``objkv top``: live rates of a fleet from its metrics, and its hottest prefixes. Read-only."""
