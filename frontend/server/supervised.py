"""Frontend's side of its supervision.

It reports its state and executes the supervisor's commands.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import structs

from tandem.frontend.control_channel import (
    BEAT_SECONDS,
    METRICS_SECONDS,
    Accept,
    Beat,
    Drain,
    End,
    FrontendEnd,
    Leaving,
    Metrics,
    Reload,
    Totals,
    frontend_end,
)
from tandem.frontend.metrics.reports import Report
from tandem.protocol.logs import LogLevel

logger = logging.getLogger(__name__)

UNANSWERED_SECONDS = 5.0
"""Seconds after which an unresponsive supervisor is ignored."""

TOTALS_SECONDS = 2.0
"""Maximum seconds that a scrape waits for the totals of all frontends."""

_SAMPLE_SECONDS = 0.05
"""Seconds between two measurements of the event loop's lag."""


class Supervisee(Protocol):
    """Interface of a supervised process."""

    def beat(self) -> Beat:
        """Return the state of the process, without its event loop lag."""
        ...

    def metrics(self) -> Report:
        """Return the metrics of the process; the caller must send each report."""
        ...

    @property
    def model_name(self) -> str:
        """Served model name; "" before an engine was connected."""
        ...

    def accept_from(self, slots: Iterable[int]) -> None:
        """Accept from the listening sockets of these slots only."""
        ...

    def drain_unasked(self) -> None:
        """Start shutdown without a command, if the supervisor does not respond."""
        ...

    def begin_drain(self, delay: float, timeout: float) -> None:
        """Accept for `delay` seconds, finish open requests within `timeout`, and exit."""
        ...

    def reload(self, log_level: LogLevel) -> None:
        """Reload keys and TLS files, and set the log level."""
        ...

    def exit(self) -> None:
        """End open requests with an error, and exit."""
        ...


class LoopLag:
    """Lag of the running event loop."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        """Initialize without starting to measure.

        observe: called with each delay in seconds.
        """
        self._observe = observe
        self._greatest = 0.0

    async def measure(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _SAMPLE_SECONDS
            await asyncio.sleep(_SAMPLE_SECONDS)
            lag = max(loop.time() - due, 0.0)
            self._observe(lag)
            self._greatest = max(self._greatest, lag)

    def take(self) -> float:
        """Return the largest delay since the last call, in seconds."""
        greatest, self._greatest = self._greatest, 0.0
        return greatest


class Supervised:
    """Frontend's end of the control channel.

    Heartbeats come from the event loop, so one that hangs sends none.
    """

    def __init__(self, sock: socket.socket, frontend: Supervisee, observe_lag: Callable[[float], None]) -> None:
        """Prepare to communicate over one socket of a pair.

        observe_lag: called with each measured delay of the event loop in seconds.
        """
        self._sock = sock
        self._frontend = frontend
        self._lag = LoopLag(observe_lag)
        self._channel: FrontendEnd | None = None
        self._unanswered: asyncio.TimerHandle | None = None
        self._scrapes: dict[int, asyncio.Future[str]] = {}
        """Scrapes that wait for the totals of all frontends."""
        self._scrape_numbers = itertools.count(1)

    async def run(self) -> None:
        """Send reports and execute commands until the channel ends.

        The process exits then, since its supervisor is gone.
        """
        channel = self._channel = await frontend_end(self._sock)
        work = (self._beat(channel), self._report_metrics(channel), self._lag.measure())
        background = [asyncio.create_task(task) for task in work]
        try:
            while (message := await channel.receive()) is not None:
                if self._unanswered is not None:
                    self._unanswered.cancel()
                match message:
                    case Accept(slots):
                        self._frontend.accept_from(slots)
                    case Drain(delay, timeout):
                        self._frontend.begin_drain(delay, timeout)
                    case End():
                        self._frontend.exit()
                    case Reload(log_level):
                        self._frontend.reload(log_level)
                    case Totals(scrape, text):
                        if (waiting := self._scrapes.get(scrape)) is not None and not waiting.done():
                            waiting.set_result(text)
            logger.error("the supervisor has ended; this frontend ends as well")
        except Exception:
            logger.exception("an order of the supervisor failed; this frontend ends")
        finally:
            for task in background:
                task.cancel()
            # Send what was counted since the last report.
            channel.send(self._report())
            channel.close()
        self._frontend.exit()

    def leave(self) -> None:
        """Ask for a successor.

        Once that serves, the supervisor asks this process to drain. If it does not respond, the process drains on its
        own.
        """
        if self._channel is not None:
            self._channel.send(Leaving())
        self._unanswered = asyncio.get_running_loop().call_later(UNANSWERED_SECONDS, self._frontend.drain_unasked)

    async def totals(self) -> str | None:
        """Return the metrics of the supervisor and all its processes.

        They are in Prometheus's text format; None if the supervisor does not respond in time.
        """
        if self._channel is None or self._channel.is_clogged:
            return None
        number = next(self._scrape_numbers)
        waiting = self._scrapes[number] = asyncio.get_running_loop().create_future()
        self._channel.send(self._report(number))
        try:
            return await asyncio.wait_for(waiting, TOTALS_SECONDS)
        except TimeoutError:
            return None
        finally:
            del self._scrapes[number]

    def _report(self, scrape: int = 0) -> Metrics:
        return Metrics(self._frontend.metrics(), scrape, self._frontend.model_name)

    async def _report_metrics(self, channel: FrontendEnd) -> None:
        while True:
            if not channel.is_clogged:
                channel.send(self._report())
            await asyncio.sleep(METRICS_SECONDS)

    async def _beat(self, channel: FrontendEnd) -> None:
        while True:
            if not channel.is_clogged:
                channel.send(structs.replace(self._frontend.beat(), loop_lag=self._lag.take()))
            await asyncio.sleep(BEAT_SECONDS)
