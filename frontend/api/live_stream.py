"""Write streamed responses after their first output.

This needs no task switch per token.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from tandem.frontend.api.formatter import Formatter
from tandem.frontend.api.write_ticks import WriteTicks
from tandem.frontend.generation.choice import ChoiceDelta, joined
from tandem.frontend.generation.generation import Generation

WRITER_KEY = "tandem.writer"
"""Key of the ASGI scope that holds the `AnswerWriter` of a response."""


class AnswerWriter(Protocol):
    """Writer of a response body that bypasses middleware.

    The headers have been sent before. The end of the response is sent via ASGI.
    """

    num_written: int
    """Bytes of the body so far, including parts sent via ASGI."""

    @property
    def has_begun(self) -> bool:
        """True once the status line has been sent."""
        ...

    @property
    def has_left(self) -> bool:
        """True once the client has disconnected."""
        ...

    @property
    def is_paused(self) -> bool:
        """True while the write buffer is full."""
        ...

    def write(self, body: bytes) -> None:
        """Write a chunk; dropped if the client has disconnected."""
        ...

    def abort(self) -> None:
        """Abort the connection and drop its unsent data."""
        ...

    def set_leave(self, leave: Callable[[], None] | None) -> None:
        """Call a function when the client disconnects."""
        ...

    def set_resume(self, resume: Callable[[], None] | None) -> None:
        """Call a function once writing is no longer paused."""
        ...


class LiveStream:
    """Writer of the output of a generation as it arrives.

    Output of one event loop iteration is one write, as is all output between two `ticks`, except that the end of a
    choice is written at once. While the client reads too slowly, tokens accumulate, and are formatted together later. A
    stream that is silent for `keep_alive` seconds gets a keep-alive.
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
        """True if deltas of a choice can be joined."""
        self._finds_ends = bool(options.stop)
        """True if only the text shows the end of a choice, so that output must be read at once."""
        self._held: list[ChoiceDelta] = []
        """Output that was read but not written yet."""
        self._written_at = 0.0
        self._waits = False
        """True between a write and the next tick, during which nothing is written."""
        self._alarm: asyncio.TimerHandle | None = None
        """Keep-alive timer, which is rearmed if it fires early."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Write until all choices have ended.

        Raises ApiError when a choice fails; the caller closes the generation.
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
        """Write all output that has arrived, and finish if it was the last."""
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
        except Exception as error:  # an exception ends this response, not the event loop's other work
            self._end.set_exception(error)
            return
        if generation.error is not None:
            self._end.set_exception(generation.error)
        elif generation.has_ended:
            self._end.set_result(None)

    def _hold(self) -> None:
        """Read new output, and write it only if a choice has ended."""
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
        """Send a keep-alive if the stream has been silent long enough."""
        assert self._keep_alive is not None
        now = self._loop.time()
        if self._written_at + self._keep_alive <= now:
            self._written_at = now
            if not self._writer.is_paused:
                self._writer.write(self._formatter.keep_alive)
        self._alarm = self._loop.call_at(self._written_at + self._keep_alive, self._ring)
