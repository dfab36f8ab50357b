"""Requests on their way in: reading, rendering, encoding, checking. A shutdown ends those that are not through yet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.frontend.api.body import BodyBudget, BodyShare
from tandem.frontend.errors import unavailable
from tandem.protocol.errors import ErrorCode


class Arrivals:
    """All requests of one process between their first byte and the engine. `len` is how many there are."""

    def __init__(self, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self._open: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[BodyShare]:
        """Holds one request and its share of the bodies. Raises ApiError 503 within it where `end_all` is called."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._open.add(limit)
                with self._bodies.share() as share:
                    yield share
        except TimeoutError:
            if not limit.expired():
                raise
            raise unavailable("the server is shutting down", ErrorCode.SHUTTING_DOWN) from None
        finally:
            self._open.discard(limit)

    def end_all(self) -> None:
        """Ends what they wait for."""
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            limit.reschedule(now)
