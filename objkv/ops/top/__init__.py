"""``objkv top``: what a fleet does now, from its metrics, and which prefixes it uses most.

Reads only. A replica that is down is a row that says so.
"""
