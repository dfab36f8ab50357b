"""Health of the engine, derived from its heartbeats.

They report the epoch of the engine, and whether it runs and makes progress.
"""

import time
from collections.abc import Callable

from msgspec import Struct

from tandem.frontend.engine.start_estimate import PREPARING, UNKNOWN_SECONDS, StartEstimate
from tandem.protocol.events import Heartbeat, Phase

_HELD = ("pausing", "paused", "sleeping", "incomplete")
"""States that operators end, at an unknown time."""


class EngineHealth(Struct, frozen=True):
    """Readiness of the engine, with the reason while it accepts no requests."""

    ready: bool
    status: str
    """State as a keyword: ready, pausing, paused, sleeping, incomplete, waiting, loading, draining, failed, silent or
    hung; in a frontend also connecting, lost or refused."""
    reason: str = ""
    """Human-readable reason; "" when ready."""
    percent: int | None = None
    """Progress of loading or warming up, 0 to 100."""

    @property
    def takes_requests(self) -> bool:
        """True if the engine accepts commands.

        It is ready, or paused, in which case requests may have to wait, or it pauses, sleeps or its weights are
        incomplete, in which cases it refuses requests.
        """
        return self.ready or self.status in _HELD


class _Pause(Struct, frozen=True):
    """Last report of an engine on whether it is paused."""

    epoch: int
    changes: int
    is_paused: bool


_READY = EngineHealth(True, "ready")


class EngineWatch:
    """Assess an engine by its heartbeats. No I/O.

    No heartbeat for `beat_timeout` seconds means that the engine is dead or stopped. Heartbeats without a launched or
    committed step for `step_timeout` seconds, while requests are pending, mean that it hangs; loading and warming up
    may take any time. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        beat_timeout: float,
        step_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        hang_timeout: float = 0.0,
    ) -> None:
        """hang_timeout: seconds of silence after which its supervisor kills the engine."""
        self.beat_timeout = beat_timeout
        self._hang_timeout = hang_timeout
        self.step_timeout = step_timeout
        self.heartbeat: Heartbeat | None = None
        """Last heartbeat of the current epoch; None before the first."""
        self._clock = clock
        self._starts = StartEstimate()
        self._heard_at = 0.0
        self._failed_handshake = ""
        """Why the last handshake failed; empty once the engine was heard again."""
        self._was_heard = False
        """True after the first heartbeat of any epoch."""
        self._progress_at = 0.0
        self._ended_epoch: int | None = None
        self._pause = _Pause(0, 0, False)

    def observe(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat, unless its process is known to have exited."""
        if heartbeat.engine_epoch == self._ended_epoch:
            return
        previous, self.heartbeat = self.heartbeat, heartbeat
        self._failed_handshake = ""
        self._was_heard = True
        self._heard_at = now = self._clock()
        self._starts.observe(heartbeat, now)
        stats = heartbeat.stats
        self._hear(_Pause(heartbeat.engine_epoch, stats.pause_changes, bool(stats.paused)))
        has_weights = heartbeat.weights is None or heartbeat.weights.state == "ready"
        is_working = heartbeat.phase is Phase.READY and not heartbeat.stats.paused and has_weights
        owes_steps = heartbeat.pending > 0 and is_working
        is_stalled = previous is not None and _position(previous) == _position(heartbeat)
        if not (owes_steps and is_stalled):
            self._progress_at = now

    def note_pause(self, epoch: int, changes: int) -> None:
        """Record the engine's reply to a pause or resume.

        epoch: epoch of the engine. changes: `Answer.pause_changes`. Earlier heartbeats are ignored. 0 means that the
        engine was never paused, or that its version does not count changes.
        """
        if changes and self.heartbeat is not None and self.heartbeat.engine_epoch == epoch:
            self._hear(_Pause(epoch, changes, changes % 2 == 1))

    def _hear(self, pause: _Pause) -> None:
        if pause.epoch != self._pause.epoch or pause.changes >= self._pause.changes:
            self._pause = pause

    def note_failure(self, reason: str) -> None:
        """Record why a handshake failed, to explain the silence that follows."""
        self._failed_handshake = reason

    def note_loss(self) -> None:
        """Record the loss of the engine, which starts the time of a restart.

        An engine that is silent without having closed its connection is stopped, and exits when its supervisor kills
        it.
        """
        self._starts.lose(self._heard_at + self._hang_timeout if self.is_silent else self._clock())

    def reset_timers(self) -> None:
        """Restart both timeouts, after a stall of the listener itself.

        Heartbeats that it missed say nothing about the engine.
        """
        self._heard_at = self._progress_at = self._clock()

    def forget(self) -> None:
        """Forget the engine, because its process has exited.

        Its heartbeats still in flight are ignored.
        """
        if self.heartbeat is not None:
            self._ended_epoch, self.heartbeat = self.heartbeat.engine_epoch, None
            self.note_loss()

    def silence(self) -> float:
        """Return the seconds since the last heartbeat; 0 before the first."""
        return self._clock() - self._heard_at if self.heartbeat is not None else 0.0

    def seconds_since_last_beat(self) -> float | None:
        """Return the age of the last heartbeat of any epoch; None before the first."""
        return self._clock() - self._heard_at if self._was_heard else None

    @property
    def is_silent(self) -> bool:
        """True once the last heartbeat is older than `beat_timeout`."""
        return self.silence() > self.beat_timeout

    def health(self) -> EngineHealth:
        """Return the current health of the engine."""
        heartbeat = self.heartbeat
        why = self._failed_handshake
        if heartbeat is None:
            return EngineHealth(False, "waiting", f"no heartbeat from the engine yet; {why or 'it may be starting'}")
        if self.is_silent:
            cause = f"; {why}" if why else ""
            return EngineHealth(False, "silent", f"no heartbeat from the engine for {self.silence():.1f} s{cause}")
        if heartbeat.phase in PREPARING:
            detail = f": {heartbeat.detail}" if heartbeat.detail else ""
            reason = f"the engine is {heartbeat.phase.value}, {heartbeat.percent} %{detail}"
            return EngineHealth(False, "loading", reason, heartbeat.percent)
        if heartbeat.phase is Phase.FAILED:
            return EngineHealth(False, "failed", f"the engine failed: {heartbeat.detail or 'no detail given'}")
        if heartbeat.phase is Phase.DRAINING:
            return EngineHealth(False, "draining", "the engine is shutting down")
        if (weights := heartbeat.weights) is not None and weights.state == "sleeping":
            tags = " and ".join(weights.asleep)
            return EngineHealth(False, "sleeping", f"the engine sleeps ({tags}); POST /wake_up wakes it")
        if weights is not None and weights.state == "incomplete" and weights.problem:
            reason = f"the weights are incomplete: {weights.problem}; swap or update them completely"
            return EngineHealth(False, "incomplete", reason)
        if self._pause.is_paused:
            return EngineHealth(False, "paused", "the engine is paused; POST /admin/resume resumes it")
        if heartbeat.pending and (stuck := self._clock() - self._progress_at) > self.step_timeout:
            reason = f"the engine made no step for {stuck:.0f} s while {heartbeat.pending} requests wait for it"
            return EngineHealth(False, "hung", reason)
        if weights is not None and weights.is_sleep_due:
            reason = "the engine sleeps once the requests in progress have ended; POST /wake_up cancels that"
            return EngineHealth(False, "sleeping", reason)
        if heartbeat.pause is not None and heartbeat.pause.refuses_new and not heartbeat.pause.is_complete:
            reason = "the engine pauses once the requests in progress have ended; POST /admin/resume cancels that"
            return EngineHealth(False, "pausing", reason)
        return _READY

    def seconds_until_ready(self) -> int:
        """Estimate the seconds until the engine is ready, from previous starts.

        The end of a pause or a sleep is unknown.
        """
        if self.health().status in _HELD:
            return UNKNOWN_SECONDS
        return self._starts.seconds(self._clock())

    def should_restart(self, hang_timeout: float) -> str:
        """Return why to kill and restart the process; "" for no reason.

        A process that was silent for `hang_timeout` seconds does not recover. A loading engine may be silent for
        longer, because loading can hold the GIL and thus stop heartbeats. A process without any heartbeat yet is left
        alone, as it may be loading from a slow disk.
        """
        heartbeat, health = self.heartbeat, self.health()
        if heartbeat is None:
            return ""
        patience = max(hang_timeout, self.step_timeout) if heartbeat.phase in PREPARING else hang_timeout
        if self.silence() > patience:
            return f"no heartbeat from the engine for {self.silence():.1f} s"
        return health.reason if health.status == "hung" else ""


def _position(heartbeat: Heartbeat) -> tuple[int, int, int]:
    """Return the engine's epoch and its numbers of steps launched and committed.

    Both are counted from the start of that epoch.
    """
    return heartbeat.engine_epoch, heartbeat.stats.steps_launched, heartbeat.stats.steps_committed
