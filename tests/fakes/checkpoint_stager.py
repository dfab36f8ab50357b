"""A stager that has a result when a test says so."""


class FakeStager:
    """Record the paths that are staged."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.num_cancelled = self.num_released = 0
        self.outcome: str | None = None
        self.root = ""

    def start(self, path: str, root: str = "") -> None:
        self.paths.append(path)
        self.root = root
        self.outcome = None

    def cancel(self) -> None:
        self.num_cancelled += 1

    def release(self) -> None:
        self.num_released += 1

    def progress(self) -> int:
        return 100 if self.outcome == "" else 40

    def result(self) -> str | None:
        return self.outcome
