"""The inventory: everything in the bucket and the index, joined once, for all commands."""
