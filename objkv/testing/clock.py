"""Time that passes when told to, for everybody's tests."""


class ManualClock:
    """Seconds since the epoch that pass when told to."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.now_s += seconds
