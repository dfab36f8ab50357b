"""What the heartbeat says about the engine: which life it is in, and whether it lives and moves.

Pure: it is told the time (seconds of a monotonic clock) and does no I/O.
"""

from msgspec import Struct

from tandem.protocol.events import Heartbeat, Phase

SILENCE_FACTOR = 3
"""Heartbeat timeouts until a silent engine is not only unready but to be killed."""

_PREPARING = (Phase.STARTING, Phase.LOADING, Phase.WARMING)


class EngineHealth(Struct, frozen=True):
    """Whether the engine can take work; if not, why."""

    ready: bool
    status: str
    """For programs: ready, waiting, loading, draining, failed, silent or hung; in a frontend connecting, lost or
    refused as well."""
    reason: str = ""
    percent: int | None = None


class EngineWatch:
    """Judges an engine by its beats.

    No beat for `beat_timeout` is a dead or stopped engine. Beats without a step launched or committed for
    `step_timeout` while work is pending are a hung one; loading and warming up take what they take.
    """

    def __init__(self, beat_timeout: float, step_timeout: float) -> None:
        self.beat_timeout = beat_timeout
        self.step_timeout = step_timeout
        self.beat: Heartbeat | None = None
        self._beat_at = 0.0
        self._moved_at = 0.0
        self._gone: int | None = None

    def observe(self, beat: Heartbeat, now: float) -> None:
        if beat.engine_epoch == self._gone:  # it was on its way when the process ended
            return
        before, self.beat = self.beat, beat
        self._beat_at = now
        owes_steps = beat.pending > 0 and beat.phase is Phase.READY
        stood_still = before is not None and _position(before) == _position(beat)
        if not (owes_steps and stood_still):
            self._moved_at = now

    def reset_timers(self, now: float) -> None:
        """The listener itself was held up: what it missed is not the engine's silence."""
        self._beat_at = max(self._beat_at, now)
        self._moved_at = max(self._moved_at, now)

    def forget(self) -> None:
        """The process has ended: nothing is known of the next, and late beats of this life are not heard."""
        if self.beat is not None:
            self._gone, self.beat = self.beat.engine_epoch, None

    def silence(self, now: float) -> float:
        """Seconds since the last beat; 0 before the first."""
        return now - self._beat_at if self.beat is not None else 0.0

    def health(self, now: float) -> EngineHealth:
        beat = self.beat
        if beat is None:
            return EngineHealth(False, "waiting", "no heartbeat from the engine yet; is it running on this endpoint?")
        if (silence := self.silence(now)) > self.beat_timeout:
            return EngineHealth(False, "silent", f"no heartbeat from the engine for {silence:.1f} s")
        if beat.phase in _PREPARING:
            detail = f": {beat.detail}" if beat.detail else ""
            return EngineHealth(
                False, "loading", f"the engine is {beat.phase.value}, {beat.percent} %{detail}", beat.percent
            )
        if beat.phase is Phase.FAILED:
            return EngineHealth(False, "failed", f"the engine failed: {beat.detail or 'no detail given'}")
        if beat.phase is Phase.DRAINING:
            return EngineHealth(False, "draining", "the engine is shutting down")
        if beat.pending and (stuck := now - self._moved_at) > self.step_timeout:
            return EngineHealth(
                False, "hung", f"the engine made no step for {stuck:.0f} s while {beat.pending} requests wait for it"
            )
        return EngineHealth(True, "ready")

    def should_restart(self, now: float) -> str:
        """Why the process should be killed, to be started again; nothing while it may recover.

        What loads is silent for longer, as code that loads may hold the interpreter, and with it the beats. A
        process that has not beaten yet is left alone: it may be reading its programs from a slow disk.
        """
        beat, health = self.beat, self.health(now)
        if beat is None:
            return ""
        patience = SILENCE_FACTOR * self.beat_timeout
        if beat.phase in _PREPARING:
            patience = max(patience, self.step_timeout)
        given_up = health.status == "hung" or self.silence(now) > patience
        return health.reason if given_up else ""


def _position(beat: Heartbeat) -> tuple[int, int, int]:
    """How far an engine has come, in which life."""
    return beat.engine_epoch, beat.stats.steps_launched, beat.stats.steps_committed
