"""Memory of a sleeping engine that checks its calls and fails when a test says so."""

from collections.abc import Callable, Collection

from tandem.engine_core.errors import SleepError
from tandem.protocol.commands import SLEEP_TAGS, SleepTag


class FakeSleepMemory:
    """Implement `contracts.SleepMemory`; check that only what is awake is released, and only the rest restored."""

    def __init__(self, on_release: Callable[[Collection[SleepTag]], None] = lambda _: None) -> None:
        """on_release: called with the tags whose contents are lost."""
        self.awake: set[SleepTag] = set(SLEEP_TAGS)
        self.has_copy = False
        self.is_on_disk = True
        self.contents = "disk"
        """What the weights are: disk, or undefined."""
        self.calls: list[str] = []
        self.faults: dict[str, SleepError] = {}
        """Errors of the next call of each name."""
        self._on_release = on_release

    @property
    def has_folder(self) -> bool:
        return self.is_on_disk

    def release(self, tags: Collection[SleepTag], keep_weights: bool) -> int:
        self._note("release")
        assert tags and self.awake >= set(tags), f"{tags} released, {self.awake} are awake"
        self.awake -= set(tags)
        if "weights" in tags:
            self.has_copy = keep_weights
        self._on_release(tags)
        return 100 * len(tags)

    def restore(self, tags: Collection[SleepTag]) -> None:
        self._note("restore")
        assert tags and not self.awake & set(tags), f"{tags} restored, {self.awake} are awake"
        self.awake |= set(tags)
        if "weights" in tags and not self.has_copy:
            self.contents = "undefined"

    def reload(self) -> bool:
        self._note("reload")
        assert "weights" in self.awake, "weights loaded into memory that is released"
        if self.is_on_disk:
            self.contents = "disk"
        return self.is_on_disk

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise self.faults.pop(name)
