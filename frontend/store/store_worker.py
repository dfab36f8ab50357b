"""Store that runs in a thread, off the event loop."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from tandem.frontend.errors import unavailable
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.run_directory import run_directory
from tandem.frontend.store.sqlite_file import open_store
from tandem.frontend.store.store import (
    ItemPage,
    PageQuery,
    ResponseStore,
    StoredItem,
    StoredResponse,
    StoreError,
    StoreLimits,
)
from tandem.frontend.workers import Workers

SAVE_SECONDS = 10.0
"""Maximum seconds to store a response; after that it is finished unstored."""
CLOSE_SECONDS = 5.0
"""Seconds for calls in progress to finish when the store is closed."""
LOG_SECONDS = 60.0
"""Seconds between two log lines about a failing store."""

logger = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class StoreWorker:
    """Run the calls of one frontend on a store, one at a time in a thread.

    private: the private directory of the store, removed at the end. Failures are counted, and logged at most once a
    minute.
    """

    def __init__(
        self,
        store: ResponseStore,
        metrics: FrontendMetrics,
        private: contextlib.ExitStack | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._private = private or contextlib.ExitStack()
        self._clock = clock
        self._thread = Workers(1, "store")
        self._next_log = float("-inf")
        self._unlogged = 0

    async def save(self, owner: str, response: StoredResponse) -> bool:
        """Store a response and return whether that succeeded.

        A failure does not affect the client's response.
        """
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                # Other calls take turns while space is freed.
                while not await self._thread.run(self._store.save, owner, response):
                    pass
        except (StoreError, TimeoutError) as error:
            self._failed("save", str(error) or f"not stored within {SAVE_SECONDS:g} s")
            return False
        return True

    async def get(self, owner: str, response_id: str, max_bytes: int) -> StoredResponse | None:
        """Return a response without its input, or None if it does not exist.

        Raises StoredTooLargeError for more than `max_bytes`, and ApiError 503 if the store fails.
        """
        return await self._run("get", self._store.get, owner, response_id, max_bytes)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response and return whether it existed.

        Raises ApiError 503 if the store fails.

        """
        return await self._run("delete", self._store.delete, owner, response_id)

    async def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredItem] | None:
        """Return all items up to the end of a response, or None if it does not exist.

        Raises StoredTooLargeError for more than `max_bytes`, and ApiError 503 if the store fails.
        """
        return await self._run("get", self._store.conversation, owner, response_id, max_bytes)

    async def input_items(self, owner: str, response_id: str, page: PageQuery, max_bytes: int) -> ItemPage | None:
        """Return a page of the items that a response read, or None if it does not exist.

        Raises StoredTooLargeError for more than `max_bytes`, UnknownItemError for a page after an item that is not
        among them, and ApiError 503 if the store fails.
        """
        return await self._run("get", self._store.input_items, owner, response_id, page, max_bytes)

    async def find_items(self, owner: str, item_ids: Sequence[str], max_bytes: int) -> dict[str, StoredItem]:
        """Return the existing ones of these items, by id.

        Raises StoredTooLargeError for more than `max_bytes`, and ApiError 503 if the store fails.

        """
        return await self._run("get", self._store.find_items, owner, item_ids, max_bytes)

    async def close(self) -> None:
        """Close the store after the calls in progress, unless they hang."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._thread.run(self._store.close)
        self._thread.close()
        self._private.close()

    async def _run(
        self, operation: str, function: Callable[[*_Arguments], _Result], *arguments: *_Arguments
    ) -> _Result:
        try:
            return await self._thread.run(function, *arguments)
        except StoreError as error:
            self._failed(operation, str(error))
            raise unavailable("stored responses cannot be read at the moment; try again later") from None

    def _failed(self, operation: str, reason: str) -> None:
        self._metrics.store_failures.labels(operation).inc()
        self._unlogged += 1
        if self._clock() >= self._next_log:
            logger.error("stored responses: %s failed (%d since the last line): %s", operation, self._unlogged, reason)
            self._next_log, self._unlogged = self._clock() + LOG_SECONDS, 0


def open_store_worker(state_dir: Path | None, limits: StoreLimits, metrics: FrontendMetrics) -> StoreWorker:
    """Open the store of a directory, or of a private directory that is removed at the end.

    Raises StoreError if the store cannot be opened.

    """
    if state_dir is not None:
        return StoreWorker(open_store(state_dir, limits), metrics)
    with contextlib.ExitStack() as private:
        store = open_store(private.enter_context(run_directory()), limits)
        return StoreWorker(store, metrics, private.pop_all())
