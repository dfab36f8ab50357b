"""Streamed responses after their first output.

Tokens become written bytes without a task switch.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from tandem.frontend.api.formatter import Formatter
from tandem.frontend.api.write_ticks import WriteTicks
from tandem.frontend.generation.choice import ChoiceDelta, joined
from tandem.frontend.generation.generation import Generation

WRITER_KEY = "tandem.writer"
"""Key of the scope of a request under which the server offers the `AnswerWriter` of its answer."""


class AnswerWriter(Protocol):
    """Writer of the body of an answer, past the layers of middleware.

    The headers have been sent. The end of the answer is sent like that of any other.
    """

    num_written: int
    """Bytes of the body so far, also of parts that were sent like those of any other answer."""

    @property
    def has_begun(self) -> bool:
        """True once the status has been sent."""
        ...

    @property
    def has_left(self) -> bool:
        """True once the client has gone."""
        ...

    @property
    def is_paused(self) -> bool:
        """True while the client reads too slowly for more to be written."""
        ...

    def write(self, body: bytes) -> None:
        """Write a part of the body, which is dropped if the client has gone."""
        ...

    def abort(self) -> None:
        """Close the connection without what waits to be sent."""
        ...

    def set_leave(self, leave: Callable[[], None] | None) -> None:
        """Call a function when the client goes."""
        ...

    def set_resume(self, resume: Callable[[], None] | None) -> None:
        """Call a function when the writer is no longer paused."""
        ...


class LiveStream:
    """Write the output of a generation as it arrives.

    All that arrives in one turn of the event loop is one write, and so is all that arrives between a write and the next
    of `ticks`, except that the end of a choice is written at once. While the client reads too slowly, tokens collect,
    and are formatted together once it has caught up. A stream that is silent for `keep_alive` seconds gets a sign of
    life.
    """

    def __init__(
        self,
        generation: Generation,
        formatter: Formatter,
        writer: AnswerWriter,
        ticks: WriteTicks,
        keep_alive: float | None = None,
    ) -> None:
        self._generation = generation
        self._formatter = formatter
        self._writer = writer
        self._ticks = ticks
        self._keep_alive = keep_alive
        options = generation.admitted.options
        self._is_joined = not options.stream_events
        """True if the deltas of a choice can be written as one."""
        self._finds_ends = bool(options.stop)
        """True if only its text tells that a choice has ended, so that no text may wait unread."""
        self._held: list[ChoiceDelta] = []
        """Output that was read and waits for its write."""
        self._written_at = 0.0
        self._waits = False
        """True between a write and the next tick, in which nothing is written."""
        self._alarm: asyncio.TimerHandle | None = None
        """Timer of the sign of life; it moves on when it rings early."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Write until every choice has ended.

        Raises ApiError when one fails; the caller closes the generation.
        """
        self._writer.set_resume(self._on_output)
        self._wrote()
        if self._keep_alive is not None:
            self._alarm = self._loop.call_later(self._keep_alive, self._ring)
        self._generation.follow(self._on_output)
        try:
            await self._end
        finally:
            self._writer.set_resume(None)
            self._ticks.forget(self._resume)
            if self._alarm is not None:
                self._alarm.cancel()

    def _on_output(self) -> None:
        generation = self._generation
        if self._writer.is_paused or self._end.done():
            return
        if not self._waits or generation.has_ended_choice:
            self._write()
        elif self._finds_ends:
            self._hold()

    def _write(self) -> None:
        """Write all output that has arrived, and end if it was the last."""
        generation = self._generation
        try:
            deltas = generation.take()
            if self._held:
                deltas, self._held = [*self._held, *deltas], []
                if self._is_joined:
                    deltas = joined(deltas)
            if deltas and (body := self._formatter.batch(deltas)):
                self._writer.write(body)
                self._wrote()
        except Exception as error:  # a bug ends this response, not the event loop's other work
            self._end.set_exception(error)
            return
        if generation.error is not None:
            self._end.set_exception(generation.error)
        elif generation.has_ended:
            self._end.set_result(None)

    def _hold(self) -> None:
        """Read what has arrived, and write it only if a choice has ended."""
        try:
            self._held += self._generation.take()
        except Exception as error:
            self._end.set_exception(error)
            return
        if self._generation.has_ended or any(delta.finish_reason for delta in self._held):
            self._write()

    def _wrote(self) -> None:
        if self._keep_alive is not None:
            self._written_at = self._loop.time()
        if self._ticks.interval and not self._waits:
            self._waits = True
            self._ticks.await_next(self._resume)

    def _resume(self) -> None:
        self._waits = False
        if self._held or self._generation.has_output:
            self._on_output()

    def _ring(self) -> None:
        """Send a sign of life if the stream has been silent for long enough."""
        assert self._keep_alive is not None
        now = self._loop.time()
        if self._written_at + self._keep_alive <= now:
            self._written_at = now
            if not self._writer.is_paused:
                self._writer.write(self._formatter.keep_alive)
        self._alarm = self._loop.call_at(self._written_at + self._keep_alive, self._ring)
