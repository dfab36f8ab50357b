"""Slot of a frontend: a listening socket and the process that serves it."""

import logging
from collections.abc import Callable

from tandem.frontend.config import frontend_name
from tandem.frontend.control_channel import FromFrontend, Leaving, Metrics
from tandem.frontend.supervisor.frontends.frontend_process import Child, FrontendProcess
from tandem.frontend.supervisor.restart_policy import Exit, RestartPolicy
from tandem.protocol.errors import ExitCode

logger = logging.getLogger(__name__)

StartChild = Callable[[int, Callable[[FromFrontend], None], Callable[[int], None]], Child]
"""Starts the process of a slot, given callbacks for its messages and for its exit code."""


class FrontendSlot:
    """Manager of the processes of one slot.

    A process that exits is restarted. One that wants to exit serves until its successor does, then drains. All methods
    return at once. Callbacks: `on_change` after each event, `on_metrics` for each metrics report, `on_end` for each
    process that has exited, `on_give_up` if the process cannot be started.
    """

    def __init__(
        self,
        number: int,
        start_child: StartChild,
        policy: RestartPolicy,
        drain_timeout: float,
        on_metrics: Callable[[FrontendProcess, Metrics], None],
        on_end: Callable[[FrontendProcess], None],
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_give_up: Callable[[ExitCode], None],
    ) -> None:
        self.number = number
        self.policy = policy
        self.restarts = {"exit": 0, "hang": 0, "replaced": 0}
        """Number of restarts, by why the previous process exited or will exit."""
        self.current: FrontendProcess | None = None
        """Newest process; None during the pause before a restart."""
        self.predecessors: list[FrontendProcess] = []
        """Older processes that serve until the newest does, or that drain."""
        self._start_child = start_child
        self._drain_timeout = drain_timeout
        self._on_metrics = on_metrics
        self._on_end = on_end
        self._clock = clock
        self._on_change = on_change
        self._on_give_up = on_give_up
        self._start_at: float | None = clock()
        self._restart_reason = ""
        """Reason of the next start, a key of `restarts`; "" for the first start."""

    @property
    def name(self) -> str:
        """Name of the processes in logs and metrics."""
        return frontend_name(self.number)

    @property
    def processes(self) -> list[FrontendProcess]:
        """All running processes, newest last."""
        return self.predecessors + ([self.current] if self.current is not None else [])

    @property
    def is_covered(self) -> bool:
        """True while a process accepts connections of the slot."""
        return any(process.serves_own_slot for process in self.processes)

    def check(self, hang_timeout: float) -> None:
        """Start a process if it is due, and kill those that hang.

        Call this several times a second.

        """
        for process in self.processes:
            if reason := process.overdue(hang_timeout):
                logger.error("%s, process %s, is killed: %s", self.name, process.child.pid, reason)
                process.child.kill()
        if self._start_at is not None and self._clock() >= self._start_at:
            self._start()

    def stop(self, delay: float, timeout: float) -> None:
        """Drain all processes for good."""
        self._start_at = None
        for process in self.processes:
            process.drain(delay, timeout)

    def end(self) -> None:
        """End all processes for good, and open requests with an error."""
        self._start_at = None
        for process in self.processes:
            process.end()

    def kill(self) -> None:
        """Kill all processes for good."""
        self._start_at = None
        for process in self.processes:
            process.kill()

    def _start(self) -> None:
        self._start_at = None
        if self._restart_reason:
            self.restarts[self._restart_reason] += 1
        # The process and its callbacks refer to each other.
        holder: list[FrontendProcess] = []
        child = self._start_child(
            self.number, lambda message: self._hear(holder[0], message), lambda code: self._end(holder[0], code)
        )
        self.current = FrontendProcess(self.number, child, self._clock)
        holder.append(self.current)

    def _hear(self, process: FrontendProcess, message: FromFrontend) -> None:
        if isinstance(message, Metrics):
            self._on_metrics(process, message)
            return
        was_ready = process.was_ready
        process.record(message)
        if process.was_ready and not was_ready:
            logger.debug("%s, process %s, is ready", self.name, process.child.pid)
        if isinstance(message, Leaving) and process is self.current and not process.is_draining:
            logger.info("%s, process %s, ends; its successor is started first", self.name, process.child.pid)
            self.predecessors.append(process)
            self._restart_reason = "replaced"
            self._start()
        elif self.current is not None and self.current.serves_own_slot:
            self.policy.mark_ready()
            for predecessor in self.predecessors:
                predecessor.drain(0.0, self._drain_timeout)
        self._on_change()

    def _end(self, process: FrontendProcess, code: int) -> None:
        self._on_end(process)
        if process is not self.current:
            self.predecessors.remove(process)
        else:
            self.current = None
            if not process.is_draining:
                self._restart_reason = "hang" if process.was_overdue else "exit"
                self._restart(Exit(code, process.was_ready, self._clock() - process.started_at))
        self._on_change()

    def _restart(self, ended: Exit) -> None:
        """Schedule the next start after an unexpected exit."""
        verdict = self.policy.after(ended, self.name)
        logger.log(logging.ERROR if verdict.level == "error" else logging.DEBUG, "%s", verdict.line)
        if verdict.restart_after is None:
            self._on_give_up(verdict.exit_code)
        else:
            self._start_at = self._clock() + verdict.restart_after
