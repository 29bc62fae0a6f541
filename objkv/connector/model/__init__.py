"""Reads vLLM's configuration: identity, groups, weights, adapters and media."""
