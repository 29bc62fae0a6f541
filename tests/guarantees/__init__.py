"""What the suite guarantees, each with a change to the code that breaks it, and its tests."""
