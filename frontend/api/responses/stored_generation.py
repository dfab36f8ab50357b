"""Generate a response and store it before its last byte is sent."""

from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from tandem.frontend.api.byte_budget import Reservation
from tandem.frontend.api.generation_response import GenerationResponse
from tandem.frontend.api.responses.response import ResponsesFormatter
from tandem.frontend.api.service import Service
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.generation import Generation
from tandem.frontend.generation.usage import Usage
from tandem.frontend.store.store import StoredItem
from tandem.frontend.store.store_worker import StoreWorker


class ResponseRecord:
    """Input and predecessor of a response that will be stored."""

    def __init__(
        self,
        store: StoreWorker,
        owner: str,
        given: Sequence[StoredItem],
        previous: str | None,
        reservation: Reservation,
    ) -> None:
        """Keep the input of a response until it ends.

        `previous` is the id of the response it continues; `reservation` covers the memory of the input.
        """
        self._store = store
        self._owner = owner
        self._given = given
        self._previous = previous
        self._reservation = reservation

    async def save(self, formatter: ResponsesFormatter) -> None:
        """Store a finished response, and set its field `store` to False if that fails."""
        formatter.is_stored = await self._store.save(self._owner, formatter.stored_form(self._given, self._previous))

    def release(self) -> None:
        """Release the reservation of the input."""
        self._reservation.release()


class StoredGenerationResponse(GenerationResponse):
    """Response that is stored before its last byte is sent.

    A response that ends with an error is stored as failed. It is not stored if its client disconnects before the end.
    """

    def __init__(
        self, generation: Generation, formatter: ResponsesFormatter, service: Service, record: ResponseRecord
    ) -> None:
        super().__init__(generation, formatter, service)
        self._responses = formatter
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._record.release()

    async def end(self, usage: Usage) -> bytes:
        events = self._responses.end(usage)
        await self._record.save(self._responses)
        return events + self._responses.last_event()

    async def fail(self, error: ApiError) -> bytes:
        events = self._responses.fail(error)
        await self._record.save(self._responses)
        return events + self._responses.last_event()

    async def encode(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        await self.run_apart(choices, self._responses.read, choices, usage)
        await self._record.save(self._responses)
        return self._responses.encoded()
