"""The index in Redis or Valkey."""
