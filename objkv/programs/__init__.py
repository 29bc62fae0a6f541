"""Programs that objkv starts with ``python -m``, each in a process of its own."""
