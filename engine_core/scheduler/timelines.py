"""Times of the sequences that are traced."""

from msgspec import Struct

from tandem.engine_core.plan import StepPlan
from tandem.engine_core.sequence import Sequence
from tandem.protocol.events import SequenceTimes


class Timeline(Struct):
    """Times of one sequence, in seconds of the engine's clock."""

    seq: Sequence
    admitted: float
    launched: float | None = None
    first_token: float | None = None
    num_steps: int = 0

    def times(self, ended: float | None) -> SequenceTimes:
        """Return the times since the engine received the sequence."""
        start = self.seq.arrival
        return SequenceTimes(
            self.seq.request_id,
            self.admitted - start,
            None if self.launched is None else self.launched - start,
            None if self.first_token is None else self.first_token - start,
            None if ended is None else ended - start,
            self.num_steps,
            self.seq.preemptions,
        )


class Timelines:
    """Timelines of the traced sequences that were admitted and have not ended."""

    def __init__(self) -> None:
        self._open: dict[int, Timeline] = {}

    def __len__(self) -> int:
        return len(self._open)

    def on_admit(self, seq: Sequence, now: float) -> None:
        """Begin the timeline of a sequence, unless it was preempted before."""
        if seq.submit.is_traced and seq.id not in self._open:
            self._open[seq.id] = Timeline(seq, now)

    def on_launch(self, plan: StepPlan, now: float) -> None:
        """Record a launched step."""
        for row in plan.rows:
            if (line := self._open.get(row.seq_id)) is not None:
                line.num_steps += 1
                if line.launched is None:
                    line.launched = now

    def on_commit(self, now: float) -> list[Timeline]:
        """Record the tokens of a committed step.

        Return the timelines that got their first one.
        """
        begun = []
        for line in self._open.values():
            if line.first_token is None and line.seq.generated:
                line.first_token = now
                begun.append(line)
        return begun

    def on_end(self, seq: Sequence, now: float) -> SequenceTimes:
        """Return the times of a traced sequence that has ended, and forget it."""
        line = self._open.pop(seq.id, None)
        if line is None:  # it was never admitted
            return SequenceTimes(seq.request_id, ended=now - seq.arrival)
        return line.times(now)
