"""What a stretch of output adds to an assistant's message."""

from msgspec import Struct


class Content(Struct, frozen=True):
    """Text for the reader."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text that the model wrote for itself."""

    text: str


class CallStart(Struct, frozen=True):
    """A call of a tool begins; its arguments follow."""

    index: int
    id: str
    name: str


class CallArguments(Struct, frozen=True):
    """More of the JSON of a call's arguments; joined, exactly what the model wrote."""

    index: int
    text: str


MessageDelta = Content | Reasoning | CallStart | CallArguments
