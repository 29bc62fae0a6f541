"""What it is called: namespaces, prefix hashes, chunk keys, shards. Pure values, no I/O."""
