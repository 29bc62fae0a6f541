"""``objkv size``: how much KV a model makes and what storing it takes."""
