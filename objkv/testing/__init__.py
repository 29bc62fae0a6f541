"""Contracts that every store and index is held to, and fakes.

Shipped, so that a store or an index written elsewhere can be held to the same promises.
"""
