"""Names: namespaces, prefix hashes, chunk keys, shards. Pure values, no I/O."""
