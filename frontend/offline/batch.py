"""Run the requests of a call concurrently, with a progress bar."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from tandem.frontend.errors import ApiError
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.generation import Generation
from tandem.frontend.offline.result import EngineError, RequestError
from tandem.frontend.progress import Progress

logger = logging.getLogger(__name__)


class _AnyResult(Protocol):
    @property
    def error(self) -> RequestError | None: ...


_Item = TypeVar("_Item")
_Result = TypeVar("_Result", bound=_AnyResult)


class BatchOptions(Struct, frozen=True):
    """Options for running a batch."""

    progress: bool = True
    """True to show a progress bar if stderr is a terminal."""
    raise_on_error: bool = False
    """True to raise at the first request that fails, and cancel the others."""


class Batch:
    """Requests of a call and their progress."""

    def __init__(
        self, label: str, total: int, options: BatchOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._bar = Progress(label, total, None)
        self._started = clock()
        self._drawn = self._started
        self._done = 0
        self._tokens = 0

    async def run(
        self,
        run_one: Callable[[_Item], Awaitable[_Result]],
        items: Sequence[_Item],
        workers: int,
        failed: Callable[[RequestError, _Item], _Result],
    ) -> list[_Result]:
        """Run all items and return the results in order.

        At most `workers` run concurrently. An ApiError becomes the result of `failed`, or is raised as RequestError
        with `BatchOptions.raise_on_error`. Raises EngineError if the engine has exited.
        """
        results: list[_Result | None] = [None] * len(items)
        waiting = iter(enumerate(items))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(items), workers)):
                    group.create_task(self._work(run_one, waiting, results, failed))
        except* (RequestError, EngineError) as errors:
            raise errors.exceptions[0] from None
        finally:
            if self._options.progress:
                self._bar.clear()
        found = [one for one in results if one is not None]
        self._report_failures(found)
        return found

    async def collect(self, generation: Generation) -> list[ChoiceDelta]:
        """Collect the choices of a request and count their tokens as they arrive."""
        return await generation.collect(self._count)

    async def _work(
        self,
        run_one: Callable[[_Item], Awaitable[_Result]],
        waiting: Iterator[tuple[int, _Item]],
        results: list[_Result | None],
        failed: Callable[[RequestError, _Item], _Result],
    ) -> None:
        for index, item in waiting:
            try:
                results[index] = await run_one(item)
            except ApiError as error:
                failure = RequestError(index, error)
                if self._options.raise_on_error:
                    raise failure from error
                results[index] = failed(failure, item)
            self._done += 1
            self._draw_if_due()

    def _count(self, pieces: Sequence[ChoiceDelta]) -> None:
        self._tokens += sum([len(piece.token_ids) for piece in pieces])
        self._draw_if_due()

    def _draw_if_due(self) -> None:
        now = self._clock()
        if self._options.progress and now - self._drawn >= self._bar.interval:
            self._drawn = now
            self._bar.draw(self._done, now - self._started, self._tokens)

    def _report_failures(self, results: Sequence[_AnyResult]) -> None:
        errors = [result.error for result in results if result.error is not None]
        if errors:
            logger.warning("%d of %d requests failed, the first with: %s", len(errors), len(results), errors[0])
