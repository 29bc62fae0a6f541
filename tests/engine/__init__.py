"""Tests against real vLLM engines on the CPU; ``job`` and ``harness`` are where to start."""
