"""The items that a response continues: those of earlier responses, and its own."""

from msgspec import Struct

from tandem.frontend.api.request_body import MAX_INLINE_BODY
from tandem.frontend.api.responses.input_items import InputItem, Reference, check_count, parse_stored
from tandem.frontend.errors import ApiError, unsupported
from tandem.frontend.store.store import ConversationTooLargeError
from tandem.frontend.store.store_worker import StoreWorker
from tandem.frontend.workers import Workers


class Context(Struct, frozen=True):
    """The items of a request whose references and predecessors are resolved."""

    earlier: list[InputItem]
    """Input and output of the responses before this one."""
    own: list[InputItem]
    """The input of the request itself."""

    @property
    def items(self) -> list[InputItem]:
        """All items that the model reads."""
        return [*self.earlier, *self.own]


class ContextLoader:
    """Load the stored items that requests refer to.

    Without `store` nothing is stored. A conversation of more than `max_bytes` is not loaded.
    """

    def __init__(self, store: StoreWorker | None, parser: Workers, max_bytes: int) -> None:
        self._store = store
        self._parser = parser
        self._max_bytes = max_bytes

    async def load(self, owner: str, previous: str | None, items: list[InputItem]) -> Context:
        """Load what a request continues, and the items that it names.

        Raises ApiError 400 or 404 for a response or an item that is not stored.
        """
        earlier = [] if previous is None else await self._conversation(owner, previous)
        own = await self._resolved(owner, items, {item.item.id for item in earlier if item.item.id})
        context = Context(earlier, own)
        check_count(context.items)
        return context

    async def _conversation(self, owner: str, previous: str) -> list[InputItem]:
        try:
            found = await self._stored.conversation(owner, previous, self._max_bytes)
        except ConversationTooLargeError as error:
            raise unsupported(
                f"{{param}}: the stored conversation has {error.size} bytes, at most {self._max_bytes} are allowed; "
                "begin a new one",
                "previous_response_id",
            ) from None
        if found is None:
            raise ApiError(
                400,
                f"Previous response with id {previous[:100]!r} not found.",
                "previous_response_id",
                "previous_response_not_found",
            )
        if sum([len(item.body) for item in found]) <= MAX_INLINE_BODY:
            return parse_stored(found)
        return await self._parser.run(parse_stored, found)

    async def _resolved(self, owner: str, items: list[InputItem], known: set[str]) -> list[InputItem]:
        """Replace references by their items.

        An item that the conversation has already is not repeated.
        """
        wanted = [item.item.id for item in items if isinstance(item.item, Reference)]
        if not wanted:
            return items
        found = await self._stored.find_items(owner, [item_id for item_id in wanted if item_id not in known])
        for index, item in enumerate(items):
            if isinstance(item.item, Reference) and item.item.id not in known and item.item.id not in found:
                raise _unknown_item(item.item.id, index)
        parsed = dict(zip(found, parse_stored(list(found.values())), strict=True))
        resolved: list[InputItem] = []
        for item in items:
            if not isinstance(item.item, Reference):
                resolved.append(item)
            elif item.item.id in parsed:
                resolved.append(parsed[item.item.id])
        return resolved

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


def _unknown_item(item_id: str, index: int) -> ApiError:
    message = f"Item with id {item_id[:100]!r} not found."
    return ApiError(404, message, f"input[{index}].id", "item_not_found")
