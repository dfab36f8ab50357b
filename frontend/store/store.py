"""The interface of a store of responses, which every backend implements."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from tandem.frontend.store.stored_response import StoredItem, StoredResponse


class StoreError(Exception):
    """A failure to open a store, or to read or write an object.

    The message says why.
    """


class StoreLimits(Struct, frozen=True):
    """Bounds of a store."""

    max_bytes: int = 2**30
    """Limit on the bytes of all objects and their indexes."""
    ttl: float = 30 * 86400.0
    """Seconds that a conversation is kept after its last response."""
    max_owner_bytes: int | None = None
    """Limit on the bytes of all objects of one owner; None for no limit but that of the store."""


class ResponseStore(Protocol):
    """Responses and their items, each of which belongs to an owner.

    Methods block, may be called from any one thread at a time, and raise StoreError if the backend fails. A write is
    done in full or not at all. An object of another owner looks like one that does not exist. Several processes may
    use one store at the same time.
    """

    def save(self, owner: str, response: StoredResponse) -> None:
        """Store a response.

        Other conversations make room for it, those that were continued least recently first; where the bound on one
        owner's bytes is reached, only that owner's. Raises StoreError if the response that it continues is gone, or if
        its conversation alone exceeds a bound.
        """

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, or None if it does not exist."""

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response and tell whether it existed.

        Its items are kept as long as a response that continues it exists.
        """

    def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredItem] | None:
        """Return all items up to the end of a response, or None if it does not exist.

        They are the input and output of every response of its conversation, the oldest first. Raises
        ConversationTooLargeError if they have more than `max_bytes` bytes.
        """

    def find_items(self, owner: str, item_ids: Sequence[str]) -> dict[str, StoredItem]:
        """Return those of the items that exist, by id."""

    def close(self) -> None:
        """Release the store; idempotent."""


class ConversationTooLargeError(Exception):
    """A stored conversation is larger than its reader allows; `size` is its bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the conversation has {size} bytes")
        self.size = size
