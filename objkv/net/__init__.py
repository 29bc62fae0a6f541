"""Sockets that end in time, the circuit breaker, and how RESP is read."""
