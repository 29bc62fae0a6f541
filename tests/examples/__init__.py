"""What `examples/` says it does, it does."""
