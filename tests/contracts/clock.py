"""A clock that tests set by hand."""


class ManualClock:
    """Seconds since the epoch, which change only through ``advance``."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
