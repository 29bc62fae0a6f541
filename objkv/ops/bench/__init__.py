"""``objkv bench``: what objkv reaches of what this machine allows, measured in the same run."""
