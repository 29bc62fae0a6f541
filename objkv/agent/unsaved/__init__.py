"""Payloads that an agent holds back until they are seen a second time."""
