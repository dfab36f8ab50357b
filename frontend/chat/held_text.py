"""How much of a text's end has to wait for what follows: it may be the beginning of a marker, or blanks ahead of one.

Bounded, so that a model that writes blanks without end costs no more than any other.
"""

BLANK = " \t\r\n"
MAX_BLANKS = 64
"""Blanks beside a marker that are dropped with it; more of them are text."""


def held_length(text: str, marker: str) -> int:
    """Characters at the end of a text without the marker that may belong to one that is not complete yet."""
    begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return begun + blanks_before(text, len(text) - begun)


def blanks_before(text: str, end: int) -> int:
    """How many blanks end at a place, at most MAX_BLANKS."""
    tail = text[max(0, end - MAX_BLANKS) : end]
    return len(tail) - len(tail.rstrip(BLANK))
