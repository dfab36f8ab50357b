"""Interface of a store of responses."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class StoredItem(Struct, frozen=True):
    """Item of a conversation."""

    id: str
    body: bytes
    """JSON of the item, including its id."""


class StoredResponse(Struct, frozen=True):
    """Response as it is stored."""

    id: str
    body: bytes
    """JSON of the response object without its output."""
    input: tuple[StoredItem, ...] = ()
    """Items sent by its request, without those of previous responses."""
    output: tuple[StoredItem, ...] = ()
    previous: str | None = None
    """Id of the response that this one continues; None for the first of a conversation."""


class StoreError(Exception):
    """Opening a store, or reading or writing an object, has failed.

    The message has the reason.
    """


class StoreLimits(Struct, frozen=True):
    """Limits of a store."""

    max_bytes: int = 2**30
    """Maximum bytes of all objects and their indexes."""
    ttl: float = 30 * 86400.0
    """Seconds that a conversation is kept after its last response."""
    max_owner_bytes: int | None = None
    """Maximum bytes of all objects of one owner; None for no separate limit."""


class PageQuery(Struct, frozen=True):
    """Query for a page of a list of items."""

    limit: int
    """Maximum number of items of the page."""
    max_bytes: int
    """Maximum bytes of the page, unless a single item is larger."""
    is_ascending: bool = False
    """True for oldest first."""
    after: str | None = None
    """Id of the item after which the page starts; None for the first page."""


class ItemPage(Struct, frozen=True):
    """Page of items, in order."""

    items: list[StoredItem]
    has_more: bool
    """True if more items follow."""


class ResponseStore(Protocol):
    """Store of responses and their items, each with an owner.

    Methods block, may be called from one thread at a time, and raise StoreError if the backend fails. Writes are
    atomic. Objects of other owners appear not to exist. Several processes may share a store.
    """

    def save(self, owner: str, response: StoredResponse) -> bool:
        """Store a response; return False if space was freed only in part, so that it must be saved again.

        Other conversations are evicted: those of the owner with the most bytes first, least recently used first. If the
        owner's own limit is reached, only its own are. Raises StoreError if the continued response is gone, or if its
        conversation alone exceeds a limit.
        """

    def get(self, owner: str, response_id: str, max_bytes: int) -> StoredResponse | None:
        """Return a response without its input, or None if it does not exist.

        Raises StoredTooLargeError if it has more than `max_bytes` bytes.
        """

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response and return whether it existed.

        Its items are kept while a response that continues it exists.
        """

    def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredItem] | None:
        """Return all items up to the end of a response, or None if it does not exist.

        These are the input and output of every response of its conversation, oldest first. Raises StoredTooLargeError
        if they exceed `max_bytes`.
        """

    def input_items(self, owner: str, response_id: str, page: PageQuery, max_bytes: int) -> ItemPage | None:
        """Return a page of the items that a response read, or None if it does not exist.

        These are the items of its conversation without its own output. Raises StoredTooLargeError if the page exceeds
        `max_bytes`, and UnknownItemError if the item after which it starts is not among them.
        """

    def find_items(self, owner: str, item_ids: Sequence[str], max_bytes: int) -> dict[str, StoredItem]:
        """Return the existing ones of these items, by id.

        Raises StoredTooLargeError if they have more than `max_bytes` bytes.

        """

    def close(self) -> None:
        """Close the store. Idempotent."""


class StoredTooLargeError(Exception):
    """A stored object is larger than its reader allows; `size` is in bytes.

    It was not loaded.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"what is stored has {size} bytes")
        self.size = size


class UnknownItemError(Exception):
    """The item after which a page starts is not in the list."""
