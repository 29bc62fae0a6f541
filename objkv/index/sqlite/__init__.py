"""The index in an SQLite file."""
