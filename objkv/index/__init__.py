"""Indexes: records of the payloads in the stores. An index is a hint and can be rebuilt from the
bulk store."""
