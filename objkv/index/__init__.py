"""Indexes: records of the payloads in the stores, which can be rebuilt from the bulk store."""
