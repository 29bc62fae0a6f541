"""Indexes: records of the payloads in the stores, hints that can be rebuilt from the bulk store."""
