"""The bytes between Redis and a buffer: the sockets of redis-py's connections, read by us."""
