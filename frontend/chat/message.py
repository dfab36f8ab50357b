"""Assistant messages, as streamed deltas and complete, and the number of characters to hold back."""

from collections.abc import Sequence

from msgspec import Struct

from tandem.frontend.generation.output_tags import BLANK, MAX_BLANKS, partial_length


class Content(Struct, frozen=True):
    """Text of the answer."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text of the reasoning that precedes the answer."""

    text: str


class CallStart(Struct, frozen=True):
    """Start of a tool call; its arguments follow."""

    index: int
    id: str
    name: str


class CallArguments(Struct, frozen=True):
    """Fragment of a call's arguments.

    The concatenated fragments are the JSON exactly as the model wrote it.
    """

    index: int
    text: str


MessageDelta = Content | Reasoning | CallStart | CallArguments
"""One increment of a streamed message."""


class ToolCall(Struct):
    """Complete tool call."""

    id: str
    name: str
    arguments: str = ""
    """JSON text of the arguments."""


class Message(Struct):
    """Complete message."""

    content: str | None
    """Text of the answer; None if the message has only calls or reasoning."""
    reasoning: str | None
    calls: list[ToolCall]


def join_deltas(deltas: Sequence[MessageDelta]) -> Message:
    """Join all deltas of a choice into the complete message."""
    content = "".join([delta.text for delta in deltas if isinstance(delta, Content)])
    reasoning = "".join([delta.text for delta in deltas if isinstance(delta, Reasoning)])
    calls = [ToolCall(delta.id, delta.name) for delta in deltas if isinstance(delta, CallStart)]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            calls[delta.index].arguments += delta.text
    return Message(content if content or not (calls or reasoning) else None, reasoning or None, calls)


def holdback_length(text: str, marker: str) -> int:
    """Return the number of trailing characters of a text that may start an incomplete marker.

    Counts the longest suffix that is a proper prefix of the marker, and the blanks before it. The text must not contain
    the whole marker.
    """
    partial = partial_length(text, marker)
    return partial + count_blanks_before(text, len(text) - partial)


def count_blanks_before(text: str, end: int) -> int:
    """Return the number of blanks before offset `end`, at most MAX_BLANKS."""
    tail = text[max(0, end - MAX_BLANKS) : end]
    return len(tail) - len(tail.rstrip(BLANK))
