"""The interface of a store of responses, which every backend implements."""

from collections.abc import Sequence
from typing import Protocol

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


class PageQuery(Struct, frozen=True):
    """A page of a list of items."""

    limit: int
    """Most items of the page."""
    max_bytes: int
    """Bytes beyond which the page has fewer items, but at least one."""
    is_ascending: bool = False
    """True to begin with the oldest item."""
    after: str | None = None
    """Id of the item after which the page begins; None for the first page."""


class ItemPage(Struct, frozen=True):
    """Some items of a list, in its order."""

    items: list[StoredItem]
    has_more: bool
    """True if more items follow."""


class ResponseStore(Protocol):
    """Responses and their items, each of which belongs to an owner.

    Methods block, may be called from any one thread at a time, and raise StoreError if the backend fails. A write is
    done in full or not at all. An object of another owner looks like one that does not exist. Several processes may
    use one store at the same time.
    """

    def save(self, owner: str, response: StoredResponse) -> bool:
        """Store a response; return False if room for it has been made only in part, so that it is to be saved again.

        Other conversations make room, those of the owner with the most bytes first, and of these the ones that were
        continued least recently. Where the bound on one owner's bytes is reached, only that owner's do. Raises
        StoreError if the response that it continues is gone, or if its conversation alone exceeds a bound.
        """

    def get(self, owner: str, response_id: str, max_bytes: int) -> StoredResponse | None:
        """Return a response without its input, or None if it does not exist.

        Raises StoredTooLargeError if it has more than `max_bytes` bytes.
        """

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response and tell whether it existed.

        Its items are kept as long as a response that continues it exists.
        """

    def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredItem] | None:
        """Return all items up to the end of a response, or None if it does not exist.

        They are the input and output of every response of its conversation, the oldest first. Raises
        StoredTooLargeError if they have more than `max_bytes` bytes.
        """

    def input_items(self, owner: str, response_id: str, page: PageQuery, max_bytes: int) -> ItemPage | None:
        """Return a page of the items that a response read, or None if it does not exist.

        They are those of its conversation without its own output. Raises StoredTooLargeError if the page has more than
        `max_bytes` bytes, and UnknownItemError if the item after which it begins is not among them.
        """

    def find_items(self, owner: str, item_ids: Sequence[str], max_bytes: int) -> dict[str, StoredItem]:
        """Return those of the items that exist, by id.

        Raises StoredTooLargeError if they have more than `max_bytes` bytes.
        """

    def close(self) -> None:
        """Release the store; idempotent."""


class StoredTooLargeError(Exception):
    """What was stored is larger than its reader allows; `size` is its bytes.

    Nothing of it has been loaded.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"what is stored has {size} bytes")
        self.size = size


class UnknownItemError(Exception):
    """A list of items does not have the one after which a page of it should begin."""
