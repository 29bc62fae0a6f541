"""``objkv demo``: two replicas, one of which answers with KV that the other computed."""
