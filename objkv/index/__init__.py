"""Is it there: records of what the stores hold. A hint that can be rebuilt from the bulk store."""
