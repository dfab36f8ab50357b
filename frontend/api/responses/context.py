"""Load the items of a conversation: earlier responses, references to stored items, and the request's input."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from tandem.frontend.api.byte_budget import MAX_INLINE_BODY, Reservation
from tandem.frontend.api.responses.input_items import InputItem, Reference, check_count, check_parts, parse_stored
from tandem.frontend.api.responses.request import ResponsesRequest
from tandem.frontend.errors import ApiError, unsupported
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.store.store import StoredItem, StoredTooLargeError
from tandem.frontend.store.store_worker import StoreWorker
from tandem.frontend.workers import Workers

MAX_REFERENCES = 2048
"""Maximum number of references to stored items in a request."""

_Found = TypeVar("_Found")


class Context(Struct, frozen=True):
    """A request with its references and `previous_response_id` resolved to items."""

    request: ResponsesRequest
    """The request, including tools that items of its conversation add."""
    earlier: list[InputItem]
    """Input and output of the previous responses."""
    own: list[InputItem]
    """Input of this request."""
    size: int
    """Size of the request and all stored items, in bytes."""

    @property
    def items(self) -> list[InputItem]:
        """Return all items that the model reads."""
        return [*self.earlier, *self.own]


class ContextLoader:
    """Load the stored items that requests refer to.

    Without `store` nothing is stored. A request and its stored items share the limits of a request that sends them
    inline: at most `max_bytes` bytes, and the same maximum numbers of items and parts.
    """

    def __init__(self, store: StoreWorker | None, parser: Workers, max_bytes: int) -> None:
        self._store = store
        self._parser = parser
        self._max_bytes = max_bytes

    async def load(
        self, owner: str, request: ResponsesRequest, size: int, reservation: Reservation, ignored: IgnoredFields
    ) -> Context:
        """Load the previous responses of a request of `size` bytes, and the items it references.

        Grows `reservation` by the size of large items. Raises ApiError 400 or 404 if a response or an item is not
        stored, 400 if it is too large, and 429 if the reservation cannot grow.
        """
        previous, conversation = request.previous_response_id, list[StoredItem]()
        if previous is not None:
            conversation = await self._conversation(owner, previous, size, reservation)
        loaded = _bytes(conversation)
        known = {item.id for item in conversation}
        found = await self._referred(owner, request, known, size + loaded, loaded, reservation)
        size += loaded + _bytes(found.values())
        if not conversation and not found:
            return _resolved(request, [], {}, size, ignored)
        check_count(len(conversation) + len(request.input))
        if size <= MAX_INLINE_BODY:
            return _resolved(request, conversation, found, size, ignored)
        return await self._parser.run(_resolved, request, conversation, found, size, ignored)

    async def _conversation(self, owner: str, previous: str, size: int, reservation: Reservation) -> list[StoredItem]:
        async def read(max_bytes: int) -> list[StoredItem] | None:
            return await self._stored.conversation(owner, previous, max_bytes)

        try:
            found = await self._bounded(read, size, 0, reservation)
        except StoredTooLargeError as error:
            raise unsupported(
                f"{{param}}: the stored conversation has {error.size} bytes and the request {size}, together at most "
                f"{self._max_bytes} are allowed; begin a new conversation",
                "previous_response_id",
            ) from None
        if found is None:
            raise ApiError(
                400,
                f"Previous response with id {previous[:100]!r} not found.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return found

    async def _referred(
        self, owner: str, request: ResponsesRequest, known: set[str], size: int, loaded: int, reservation: Reservation
    ) -> dict[str, StoredItem]:
        """Load the referenced items that the conversation does not contain already.

        `size`: bytes of the request and its conversation; `loaded`: the part of them that was read from the store.
        """
        references = {
            item.item.id: index
            for index, item in reversed([*enumerate(request.input)])
            if isinstance(item.item, Reference) and item.item.id not in known
        }
        if not references:
            return {}
        if len(references) > MAX_REFERENCES:
            raise unsupported(
                f"{{param}} refers to {len(references)} items, at most {MAX_REFERENCES} are allowed; continue their "
                "response with 'previous_response_id' instead",
                "input",
            )

        async def read(max_bytes: int) -> dict[str, StoredItem]:
            return await self._stored.find_items(owner, list(references), max_bytes)

        try:
            found = await self._bounded(read, size, loaded, reservation)
        except StoredTooLargeError as error:
            raise unsupported(
                f"{{param}}: the items that it refers to have {error.size} bytes, the request and its conversation "
                f"{size}, together at most {self._max_bytes} are allowed; refer to fewer",
                "input",
            ) from None
        missing = min([index for item_id, index in references.items() if item_id not in found], default=None)
        if missing is not None:
            raise _unknown_item(request.input[missing].item.id or "", missing)
        return found

    async def _bounded(
        self, read: Callable[[int], Awaitable[_Found]], size: int, loaded: int, reservation: Reservation
    ) -> _Found:
        """Read from the store within the limit left by `size` bytes, including `loaded` bytes from the store.

        Raises StoredTooLargeError if the items exceed the limit.
        """
        room = self._max_bytes - size
        try:
            return await read(min(MAX_INLINE_BODY, room))
        except StoredTooLargeError as error:
            wanted = error.size
            if wanted > room:
                raise
        reservation.grow(loaded + wanted)
        return await read(wanted)

    @property
    def _stored(self) -> StoreWorker:
        if self._store is None:
            raise ApiError(
                400,
                "this server stores no responses (--store off); send the items of the conversation instead",
                "previous_response_id",
                "previous_response_not_found",
            )
        return self._store


def _resolved(
    request: ResponsesRequest,
    conversation: Sequence[StoredItem],
    found: Mapping[str, StoredItem],
    size: int,
    ignored: IgnoredFields,
) -> Context:
    """Parse the stored items of a request and replace its references with them.

    Items that the conversation contains already, and repeated references, are skipped.
    """
    stored = [*conversation, *found.values()]
    if stored:
        check_parts([*(item.body for item in stored), *(item.raw for item in request.input)])
    earlier, referred = parse_stored(conversation), dict(zip(found, parse_stored(list(found.values())), strict=True))
    own: list[InputItem] = []
    for item in request.input:
        if not isinstance(item.item, Reference):
            own.append(item)
        elif (resolved := referred.pop(item.item.id, None)) is not None:
            own.append(resolved)
    if request.previous_response_id is not None:
        request = request.with_tools(earlier, ignored)
    return Context(request, earlier, own, size)


def _bytes(items: Iterable[StoredItem]) -> int:
    return sum([len(item.body) for item in items])


def _unknown_item(item_id: str, index: int) -> ApiError:
    message = f"Item with id {item_id[:100]!r} not found."
    return ApiError(404, message, f"input[{index}].id", "item_not_found")
