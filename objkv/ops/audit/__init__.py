"""``objkv audit``: figures, findings and costs of everything that is stored."""
