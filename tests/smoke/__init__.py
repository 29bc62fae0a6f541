"""The least of real engines, for `make test`; the rest of them are in ``tests/engine``."""
