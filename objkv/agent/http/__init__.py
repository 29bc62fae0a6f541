"""The agent over HTTP: for routers, for Prometheus, and for ``objkv prefetch``."""
