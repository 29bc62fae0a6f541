"""Where payloads are: places that hold immutable bytes under a key."""
