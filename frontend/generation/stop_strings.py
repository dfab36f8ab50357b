"""Matcher of stop strings in streamed text.

It finds them across chunk boundaries and holds back incomplete ones.
"""

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """Return the Knuth-Morris-Pratt failure table of a pattern.

    For each prefix of the pattern it has the length of the longest proper prefix that is also a suffix.
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

    Of those that end at the same position, it finds the longest. This is the only rule that does not depend on chunking
    and needs no lookahead. The matcher tracks the matched length of each stop string (Knuth-Morris-Pratt), so a
    character costs O(1) per stop string, however long and repetitive they are.

    Reasoning is matched only against stop strings that contain `end_tag`, its closing tag; the others match from the
    answer on.
    """

    __slots__ = ("_end_tag", "_firsts", "_held", "_lengths", "_stops", "_tables")

    def __init__(self, stops: Sequence[str], end_tag: str = "") -> None:
        """Compile the stop strings.

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
        """Return a matcher with the same stop strings for another text.

        They share the tables.
        """
        matcher = StopMatcher(())
        matcher._stops, matcher._tables, matcher._firsts = self._stops, self._tables, self._firsts
        matcher._lengths = [0] * len(self._stops)
        matcher._end_tag = self._end_tag
        return matcher

    def push(self, text: str, is_thought: bool = False) -> tuple[str, str | None]:
        """Append text and return the part that is safe to send.

        is_thought: True for reasoning and its tags. Also returns the stop string that was matched, or None. After a
        match the text after it is dropped, and the matcher must not be used again.
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
        """Return the held back text at the end of the stream."""
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
