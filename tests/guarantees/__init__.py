"""What the suite guarantees: each with a change that breaks it, and the tests that then fail."""
