"""The KV connector for vLLM's V1 interface. It decides what a replica loads and saves, and when."""
