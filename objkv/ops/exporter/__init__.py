"""``objkv exporter``: store and index metrics for Prometheus."""
