"""Everything that objkv reads from others, fed with what others might send.

``make fuzz`` runs for minutes with other examples every time; ``test_targets.py`` for a moment with
the same ones. A target is a function that takes one example, raises ``Finding`` (or anything else)
where a promise is broken, and says in a word what came of it.
"""
