"""State of a frontend process, derived from its messages to the supervisor."""

from collections.abc import Callable
from typing import Protocol

from tandem.frontend.control_channel import Accept, Beat, Drain, End, FromFrontend, Leaving, ToFrontend

START_SECONDS = 120.0
"""Seconds without a heartbeat before a starting process is considered hung."""
RESPONSIVE_SECONDS = 1.0
"""Seconds without a heartbeat after which other processes accept connections for a possibly hung one."""
EXTRA_STOP_SECONDS = 10.0
"""Seconds beyond the drain timeout after which a process is killed."""


class Child(Protocol):
    """Started program with a control channel."""

    @property
    def pid(self) -> int | None:
        """Process id; None before it runs and after its exit."""

    def send(self, message: ToFrontend) -> None:
        """Send a message without blocking; drop it if the channel is closed."""

    def kill(self) -> None:
        """Kill the process."""


class FrontendProcess:
    """State of a process of a slot. `clock` returns seconds."""

    def __init__(self, slot: int, child: Child, clock: Callable[[], float]) -> None:
        self.slot = slot
        self.child = child
        self.beat = Beat("starting")
        """Last heartbeat; a placeholder before the first."""
        self.has_reported = False
        """True once the process has sent a message."""
        self.was_ready = False
        """True once the process has served."""
        self.is_draining = False
        """True once the process was asked to drain."""
        self.started_at = clock()
        self._clock = clock
        self._heard_at = clock()
        self._accepts: tuple[int, ...] = (slot,)
        self._killed_for = ""
        self._end_at: float | None = None

    def record(self, message: FromFrontend) -> None:
        """Record a message."""
        self._heard_at = self._clock()
        self.has_reported = True
        if isinstance(message, Beat):
            self.beat = message
            self.was_ready |= message.status == "serving"
        elif isinstance(message, Leaving) and not self.is_draining:
            self.accept(self._accepts, again=True)

    @property
    def is_serving(self) -> bool:
        """True while the process accepts connections and sends heartbeats."""
        is_heard = self._clock() - self._heard_at <= RESPONSIVE_SECONDS
        return self.beat.status == "serving" and not self.is_draining and is_heard

    @property
    def serves_own_slot(self) -> bool:
        return self.is_serving and self.slot in self.beat.slots

    def accept(self, slots: tuple[int, ...], again: bool = False) -> None:
        """Assign slots to accept from; sent if they changed or with `again`."""
        if slots != self._accepts or again:
            self._accepts = slots
            self.child.send(Accept(slots))

    def drain(self, delay: float, timeout: float) -> None:
        """Ask the process to drain and exit, once; kill it if it has sent no message yet.

        Once it has sent a message it may be serving, whatever its last heartbeat says.
        """
        if self.is_draining:
            return
        self.is_draining = True
        if self.has_reported:
            self._end_at = self._clock() + delay + timeout + EXTRA_STOP_SECONDS
            self.child.send(Drain(delay, timeout))
        else:
            self.kill()

    def end(self) -> None:
        """Ask the process to end open requests with an error and exit.

        Kill it if it has sent no message yet.
        """
        self.is_draining = True
        if self.has_reported:
            self.child.send(End())
        else:
            self.kill()

    def kill(self) -> None:
        """Kill the process; its exit is then not a failure."""
        self.is_draining = True
        self.child.kill()

    @property
    def was_overdue(self) -> bool:
        """True once `overdue` has returned a reason to kill the process."""
        return bool(self._killed_for)

    def overdue(self, hang_timeout: float) -> str:
        """Return why the process must be killed, the first time; otherwise ""."""
        silence, reason = self._clock() - self._heard_at, ""
        if self._end_at is not None and self._clock() > self._end_at:
            reason = "it did not end in time"
        elif silence > (hang_timeout if self.was_ready else max(hang_timeout, START_SECONDS)):
            reason = f"no beat from it for {silence:.1f} s"
        if not reason or self._killed_for:
            return ""
        self._killed_for = reason
        return reason
