"""All frontends of a supervisor."""

import asyncio
from collections.abc import Callable, Sequence

from tandem.frontend.control_channel import Metrics, Reload, Totals
from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.metrics.metric_totals import MetricTotals
from tandem.frontend.supervisor.frontends.frontend_process import FrontendProcess
from tandem.frontend.supervisor.frontends.slot import FrontendSlot, StartChild
from tandem.frontend.supervisor.frontends.stall_aware_clock import TICK_SECONDS, StallAwareClock
from tandem.frontend.supervisor.restart_policy import RestartPolicy
from tandem.protocol.errors import ExitCode
from tandem.protocol.logs import LogLevel

_END_POLL_SECONDS = 0.02


class Frontends:
    """Manager of all slots.

    Every listening socket is served at any time: while no process of a slot serves, all others accept from its socket
    too. Frontends share their settings, so the first one validates them before the others are started, and once one has
    been ready, all are restarted indefinitely.
    """

    def __init__(
        self,
        count: int,
        start_child: StartChild,
        hang_timeout: float,
        drain_timeout: float,
        clock: StallAwareClock,
        make_policy: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self.exit_code: ExitCode | None = None
        """Exit code of the service; None while it runs."""
        self.metrics = MetricTotals()
        """Totals of the metrics of all processes, including those that have exited."""
        self.exposition = Exposition([self.metrics], lambda: self.metrics.model_name)
        """Metrics served by a frontend; a supervisor adds its own."""
        self._hang_timeout = hang_timeout
        self._clock = clock
        self.slots: Sequence[FrontendSlot] = [
            FrontendSlot(
                number,
                start_child,
                make_policy(),
                drain_timeout,
                self._add_up,
                self.metrics.end,
                clock,
                self._assign,
                self._give_up,
            )
            for number in range(count)
        ]
        self.has_reported = False
        """True once a frontend has accepted its settings and sent a heartbeat."""
        self._is_stopping = False

    @property
    def num_serving(self) -> int:
        """Number of slots with a process that serves them."""
        return sum(slot.is_covered for slot in self.slots)

    @property
    def engine(self) -> tuple[str, str]:
        """Status and reason of the engine as seen by the serving frontends.

        `ready` if any of them sees it as ready, otherwise the status of the first.
        """
        seen = [process.beat.engine for slot in self.slots for process in slot.processes if process.is_serving]
        return next((state for state in seen if state[0] == "ready"), seen[0] if seen else ("ready", ""))

    @property
    def was_ready(self) -> bool:
        """True once a frontend has served."""
        return any(slot.policy.was_ever_ready for slot in self.slots)

    @property
    def open_sequences(self) -> int:
        """Number of sequences in progress reported by the processes."""
        return sum(process.beat.open_sequences for slot in self.slots for process in slot.processes)

    @property
    def is_running(self) -> bool:
        """True while any process runs."""
        return any(slot.processes for slot in self.slots)

    async def supervise(self) -> ExitCode:
        """Run all slots until they have been stopped and have exited, or cannot be started."""
        while self.exit_code is None and (self.is_running or not self._is_stopping):
            self.tick()
            await asyncio.sleep(_END_POLL_SECONDS if self._is_stopping else TICK_SECONDS)
        return ExitCode.OK if self.exit_code is None else self.exit_code

    def tick(self) -> None:
        """Start processes that are due, kill those that hang, and have others cover silent slots.

        Call this every `TICK_SECONDS`.

        """
        self._clock.tick()
        for slot in self.slots:
            slot.check(self._hang_timeout)
            if not self.has_reported:
                break
        self._assign()

    def reload(self, log_level: LogLevel) -> None:
        """Have all processes reload keys and TLS files, and set their log level."""
        for slot in self.slots:
            for process in slot.processes:
                process.child.send(Reload(log_level))

    async def stop(self, delay: float, timeout: float) -> None:
        """Drain all frontends at once and wait for their exit.

        Those that take too long are killed.

        """
        self._is_stopping = True
        for slot in self.slots:
            slot.stop(delay, timeout)
        while self.is_running:
            self.tick()
            await asyncio.sleep(_END_POLL_SECONDS)

    def end(self) -> None:
        """End all frontends for good, and open requests with an error."""
        self._is_stopping = True
        for slot in self.slots:
            slot.end()

    def kill(self) -> None:
        """Kill all frontends for good."""
        self._is_stopping = True
        for slot in self.slots:
            slot.kill()

    def _add_up(self, process: FrontendProcess, report: Metrics) -> None:
        """Record the metrics of a process, and answer its pending scrape."""
        self.metrics.update(process, report.report)
        self.metrics.model_name = report.model_name or self.metrics.model_name
        if report.scrape:
            process.child.send(Totals(report.scrape, self.exposition.text()))

    def _give_up(self, exit_code: ExitCode) -> None:
        self.exit_code = self.exit_code or exit_code

    def _assign(self) -> None:
        """Assign the sockets that each process accepts from."""
        self.has_reported = self.has_reported or any(
            process.has_reported for slot in self.slots for process in slot.processes
        )
        if self.was_ready:
            for slot in self.slots:
                slot.policy.mark_ready()
        away = {slot.number for slot in self.slots if not slot.is_covered}
        for slot in self.slots:
            for process in slot.processes:
                if process.is_serving:
                    process.accept(tuple(sorted({slot.number} | away)))
