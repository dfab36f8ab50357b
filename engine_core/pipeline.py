"""State machine of the steps in flight and their slots.

It is pure bookkeeping and does not touch the device.

```text
          step t                     step t+1                      step t+2
CPU   plan launch sample | commit t-1 .. plan launch sample | commit t .. plan launch sample
GPU   ---- forward t ------ sample t  ---- forward t+1 ---- sample t+1 ---- forward t+2 ---
copy                           D2H t                           D2H t+1
upload H2D t                       H2D t+1                         H2D t+2
```

Invariants, cited elsewhere by number:

- I1  Work is enqueued in tick order, on three streams. The compute stream runs the forward pass and the sampling of
      both slots. The copy stream copies results to the host, and masks during the forward pass of their step. The
      upload stream copies a step's inputs, and the plans that graphs read, during the previous step.
- I2  Steps commit first in, first out.
- I3  The copy of a step's results waits on that step's own event, never on a whole stream.
- I4  `0 <= sequence.inflight <= depth`; only the scheduler changes it. A sequence that ended while in flight is a
      zombie: skipped at commit; its row and pages are released when `inflight == 0`.
- I5  Prompts are computed in rows of ordinary steps, which do not wait for an empty pipeline. Only two things do: a
      pause, and a step without a graph after steps with drafts (`Runtime.needs_exact_positions`).
- I6  A slot is free only after its step has *committed*: its pinned buffers are read until then.
- I7  Nothing on the launch path synchronises with the device, except a launch that has run out of device memory.
- I8  Every accepted request gets exactly one terminal event; every page and row comes back.
- I9  Positions of decode rows live on the device. The host keeps a lower and an upper bound of the length that a
      running sequence has there: once the launched steps have run, `min_device_len <= lengths[row] <= max_device_len`.
      This holds once its last known token has been launched. The bounds are equal when nothing is in flight.

A step goes LAUNCHED -> SAMPLED -> COMMITTING -> gone. Release is two-phase (I6): `begin_commit` takes the step out of
the queue, `finish_commit` frees its slot.
"""

from collections import deque
from enum import Enum

from msgspec import Struct, structs

from tandem.engine_core.plan import StepPlan


class StepState(Enum):
    """State of a step in flight."""

    LAUNCHED = "launched"
    """The forward pass is enqueued, sampling is not: the step waits for a mask."""
    SAMPLED = "sampled"
    """Sampling and the copy of the results are enqueued."""
    COMMITTING = "committing"
    """The results are being collected and applied; the slot is still held."""


class Step(Struct, frozen=True, gc=False):
    """A step in flight, immutable: each transition returns a new one."""

    plan: StepPlan
    slot: int
    state: StepState


class PipelineState:
    """At most `depth` steps in flight, one for each slot.

    Every illegal move is an assertion that prints the state.
    """

    def __init__(self, depth: int = 2) -> None:
        assert depth in (1, 2), f"depth {depth}: the pipeline has one slot or two"
        self.depth = depth
        self._queue: deque[Step] = deque()
        self._committing: Step | None = None
        self._free = list(range(depth - 1, -1, -1))

    @property
    def in_flight(self) -> int:
        """Number of steps launched and not yet being committed."""
        return len(self._queue)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Steps that hold a slot, oldest first."""
        committing = () if self._committing is None else (self._committing,)
        return (*committing, *self._queue)

    @property
    def full(self) -> bool:
        """True if every slot is held."""
        return not self._free

    def free_slot(self) -> int | None:
        """Return the slot that the next launch takes, or None while all are held."""
        return self._free[-1] if self._free else None

    def unsampled(self) -> Step | None:
        """Return the step that waits for its mask, if any; only the newest can."""
        if self._queue and self._queue[-1].state is StepState.LAUNCHED:
            return self._queue[-1]
        return None

    def launch(self, plan: StepPlan) -> Step:
        """Put a step into the free slot.

        The step before it must be sampled: its tokens are this one's input.
        """
        assert self._free, f"launch of step {plan.step_id} without a free slot: {self}"
        assert self.unsampled() is None, f"launch of step {plan.step_id} before the newest was sampled: {self}"
        newest = self._queue[-1] if self._queue else self._committing
        assert newest is None or newest.plan.step_id < plan.step_id, f"step {plan.step_id} out of order: {self}"
        step = Step(plan, self._free.pop(), StepState.LAUNCHED)
        self._queue.append(step)
        return step

    def mark_sampled(self, step: Step) -> Step:
        """Move the newest step from LAUNCHED to SAMPLED."""
        assert self._queue, f"sampling of step {step.plan.step_id}, which is not in flight: {self}"
        newest = self._queue[-1]
        assert newest is step, f"sampling of step {step.plan.step_id}, which is not the newest: {self}"
        assert newest.state is StepState.LAUNCHED, f"step {step.plan.step_id} sampled twice: {self}"
        self._queue[-1] = structs.replace(step, state=StepState.SAMPLED)
        return self._queue[-1]

    def begin_commit(self) -> Step:
        """Take the oldest step out of the queue (I2).

        Its slot stays held until `finish_commit` (I6).
        """
        assert self._queue, f"commit with nothing in flight: {self}"
        assert self._committing is None, f"second commit before the first finished: {self}"
        assert self._queue[0].state is StepState.SAMPLED, f"commit of a step that was not sampled: {self}"
        self._committing = structs.replace(self._queue.popleft(), state=StepState.COMMITTING)
        return self._committing

    def finish_commit(self, step: Step) -> None:
        """Free the slot of the step that was being committed (I6)."""
        assert self._committing is step, f"step {step.plan.step_id} is not the one committing: {self}"
        self._committing = None
        self._free.append(step.slot)

    def abandon(self) -> None:
        """Drop everything in flight.

        Only for an engine about to exit: no slot may be used again.
        """
        self._queue.clear()
        self._committing = None
        self._free.clear()

    def __repr__(self) -> str:
        steps = ", ".join(f"step {s.plan.step_id} slot {s.slot} {s.state.value}" for s in self.steps)
        return f"PipelineState(depth={self.depth}, [{steps}], free slots {sorted(self._free)})"
