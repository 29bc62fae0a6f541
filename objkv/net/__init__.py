"""Deadlines, circuit breakers, guards and RESP connections."""
