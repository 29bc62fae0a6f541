"""Wiring: the only package that uses concrete classes and decides how they wrap each other."""
