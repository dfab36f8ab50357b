"""Matcher of stop strings in streamed text.

It finds them across chunk boundaries and never lets the beginning of one through.
"""

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """Return the Knuth-Morris-Pratt failure table of a pattern.

    Its entries are, for each prefix of the pattern, the length of the longest proper prefix that is also a suffix.
    """
    table = [0] * len(pattern)
    matched = 0
    for position in range(1, len(pattern)):
        while matched and pattern[position] != pattern[matched]:
            matched = table[matched - 1]
        matched += pattern[position] == pattern[matched]
        table[position] = matched
    return table


class StopMatcher:
    """Matcher that finds the stop string that ends first.

    Of those that end together, it finds the longest. "Ends first" is the only rule that gives the same answer for every
    division into chunks without lookahead. For each stop string, the matcher tracks how much of it the text ends with
    (Knuth-Morris-Pratt), so a character costs O(1) per stop string, however long and repetitive they are.

    Reasoning is matched only against the stop strings that contain `end_tag`, the tag that closes it; the others match
    from the answer on.
    """

    __slots__ = ("_end_tag", "_firsts", "_held", "_lengths", "_stops", "_tables")

    def __init__(self, stops: Sequence[str], end_tag: str = "") -> None:
        """Prepare the stop strings.

        Raises ValueError for an empty one, which would match everywhere.
        """
        if not all(stops):
            raise ValueError("a stop string must have at least one character")
        self._stops = tuple(stops)
        self._end_tag = end_tag
        self._tables = [_failure_table(stop) for stop in stops]
        self._firsts = {stop[0] for stop in stops}
        self._lengths = [0] * len(self._stops)
        self._held = ""

    def fresh(self) -> "StopMatcher":
        """Return a matcher of the same stop strings for another text.

        The two share their tables.
        """
        matcher = StopMatcher(())
        matcher._stops, matcher._tables, matcher._firsts = self._stops, self._tables, self._firsts
        matcher._lengths = [0] * len(self._stops)
        matcher._end_tag = self._end_tag
        return matcher

    def push(self, text: str, is_thought: bool = False) -> tuple[str, str | None]:
        """Append text and return the part that is safe to send.

        `is_thought` is true for reasoning and the tags around it. The stop string that the text completed comes with
        it, or None. After a match the text behind it is dropped, and the matcher must not be used again.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        buffer = self._held + text
        start = len(self._held)
        for position in range(start, len(buffer)):
            completed = self._advance(buffer[position], is_thought)
            if completed is not None:
                self._held = ""
                return buffer[: position + 1 - len(completed)], completed
        keep = max(self._lengths, default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, is_thought: bool) -> str | None:
        """Advance by one character; return the longest stop string that it completes."""
        completed: str | None = None
        for index, stop in enumerate(self._stops):
            if is_thought and self._end_tag not in stop:
                continue
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
