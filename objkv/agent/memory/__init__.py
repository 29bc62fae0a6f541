"""Memory that an agent writes and replicas read."""
