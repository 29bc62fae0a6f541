"""Wiring: the only place that knows concrete classes, and the order of what wraps them."""
