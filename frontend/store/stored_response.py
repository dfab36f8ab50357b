"""A stored response: its fields, and the items that it read and wrote."""

from msgspec import Struct


class StoredItem(Struct, frozen=True):
    """One item of a conversation."""

    id: str
    body: bytes
    """JSON of the item, its id included."""


class StoredResponse(Struct, frozen=True):
    """One response as a store keeps it."""

    id: str
    body: bytes
    """JSON of the response object without its output."""
    input: tuple[StoredItem, ...] = ()
    """The items that its request sent, without those of the responses before it."""
    output: tuple[StoredItem, ...] = ()
    previous: str | None = None
    """Id of the response that this one continues; None for the first of a conversation."""
