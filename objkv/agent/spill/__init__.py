"""The tier below the arena: payloads on a local disk."""
