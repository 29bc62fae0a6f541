"""The node agent: it fetches, verifies and keeps payloads for every replica of a node."""
