"""A clock that moves only on request."""


class FakeClock:
    """Clock in seconds that `advance` moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
