"""Operators' verbs: inspect, check, explain. Each returns plain values and prints nothing."""
