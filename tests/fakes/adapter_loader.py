"""A loader of adapters whose work is done when a test says so."""

from dataclasses import dataclass, field

from tandem.engine_core.contracts import LoadResult


@dataclass
class FakeAdapterLoader:
    """Record what is asked for; a test appends the results."""

    results: list[LoadResult] = field(default_factory=list)
    read_paths: dict[int, str] = field(default_factory=dict)
    placed: list[tuple[int, int]] = field(default_factory=list)
    """Versions and slots, in the order in which they were asked for."""
    dropped: list[int] = field(default_factory=list)

    def read(self, version: int, path: str, root: str) -> None:
        assert version not in self.read_paths
        self.read_paths[version] = path

    def place(self, version: int, path: str, slot: int) -> None:
        self.placed.append((version, slot))

    def drop(self, version: int) -> None:
        assert version not in self.dropped
        self.dropped.append(version)

    def take_results(self) -> list[LoadResult]:
        found, self.results = self.results, []
        return found
