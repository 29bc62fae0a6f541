"""vLLM's configuration in objkv's words: identity, groups, weights, adapters, media."""
