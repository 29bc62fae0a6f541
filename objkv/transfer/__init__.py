"""When, and in whose memory: plans, slabs, lanes, and the threads that move payloads."""
