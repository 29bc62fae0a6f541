"""Kinds of KV cache of a model, and their support, from ``config.json`` without vLLM."""
