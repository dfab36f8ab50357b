"""A change of the weights that does what a test says."""

from collections.abc import Callable

from tandem.engine_core.contracts import RunningMode


class FakeWeightChange:
    """Record the calls of the loop."""

    def __init__(self, running: RunningMode, work: Callable[[], str | None], deadline: float = float("inf")) -> None:
        """work: replaces the weights; returns the name of the version, or raises WeightsError."""
        self.running: RunningMode = running
        self.deadline = deadline
        self.work = work
        self.problems: list[str] = []
        """What `finish` was called with."""

    def apply(self) -> str | None:
        return self.work()

    def finish(self, problem: str) -> None:
        self.problems.append(problem)
