"""Stop strings over a stream of text: matched across any chunk edges, and never leaked."""

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    matched = 0
    for position in range(1, len(pattern)):
        while matched and pattern[position] != pattern[matched]:
            matched = table[matched - 1]
        matched += pattern[position] == pattern[matched]
        table[position] = matched
    return table


class StopMatcher:
    """Finds the stop string that ends first; of those that end together, the longest.

    "Ends first" is the one rule that gives the same answer however the text is cut into chunks without looking
    ahead. Each stop string keeps how much of it the text so far ends with (Knuth-Morris-Pratt), so a character
    costs O(1) for each stop string, however long and repetitive they are.
    """

    __slots__ = ("_firsts", "_held", "_lengths", "_stops", "_tables")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        if not all(stops):
            raise ValueError("a stop string must have at least one character")
        self._stops = tuple(stops)
        self._tables = [_failure_table(stop) for stop in stops]
        self._firsts = {stop[0] for stop in stops}
        self._lengths = [0] * len(self._stops)
        self._held = ""

    def fresh(self) -> "StopMatcher":
        """A matcher of the same stop strings at the start of another text; what was computed of them is shared."""
        matcher = StopMatcher(())
        matcher._stops, matcher._tables, matcher._firsts = self._stops, self._tables, self._firsts
        matcher._lengths = [0] * len(self._stops)
        return matcher

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that just completed, if one did.

        Once a stop string has matched, what follows it is dropped and the matcher must not be used again.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        buffer = self._held + text
        start = len(self._held)
        for position in range(start, len(buffer)):
            completed = self._advance(buffer[position])
            if completed is not None:
                self._held = ""
                return buffer[: position + 1 - len(completed)], completed
        keep = max(self._lengths, default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Takes one character; returns the longest stop string that it completes."""
        completed: str | None = None
        for index, stop in enumerate(self._stops):
            table = self._tables[index]
            matched = self._lengths[index]
            while matched and stop[matched] != character:
                matched = table[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                if completed is None or len(stop) > len(completed):
                    completed = stop
                matched = table[matched - 1]
            self._lengths[index] = matched
        return completed
