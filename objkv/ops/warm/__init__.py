"""Warming: prefixes are computed and saved before anybody asks for them."""
