"""The scheduler at one moment, for people."""

from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.events import InspectedSequence, InspectedSession, Inspection, SequenceState
from tandem.protocol.stats import EngineStats

MAX_LISTED = 256
"""Waiting requests that are listed one by one."""


def inspect(scheduler: Scheduler, call: int, stats: EngineStats, now: float) -> Inspection:
    """Changes nothing. stats: of the engine, which belong to the picture."""
    memory = scheduler.memory
    waiting = [*scheduler.waiting, *scheduler.compiling.values()]
    running = list(scheduler.running.values())
    others = [seq for seq in scheduler.held if seq.id not in scheduler.running]
    sequences = [_sequence(seq, _state(seq), now) for seq in running]
    sequences += [_sequence(seq, "leaving" if seq.outcome is None else "zombie", now) for seq in others]
    for seq in waiting[:MAX_LISTED]:
        state: SequenceState = "compiling" if seq.compiling else "following" if memory.follows(seq) else "waiting"
        sequences.append(_sequence(seq, state, now, now - seq.queued_at))
    return Inspection(
        call,
        scheduler.policy,
        stats,
        memory.pages.free,
        memory.settling,
        sequences,
        [
            InspectedSession(
                session.name,
                session.turn is not None,
                len(session.pages),
                now - session.idle_since if session.turn is None else 0.0,
            )
            for session in memory.sessions.known
        ],
        max(0, len(waiting) - MAX_LISTED),
    )


def oldest_wait(scheduler: Scheduler, now: float) -> float:
    """Seconds since the longest stay in the queue began, also of those whose grammar compiles; 0: nobody waits."""
    firsts = (scheduler.waiting.longest_waiting, next(iter(scheduler.compiling.values()), None))
    return max([0.0, *(now - seq.queued_at for seq in firsts if seq is not None)])


def _state(seq: Sequence) -> SequenceState:
    """What a preemption took is computed again like a prompt; what a grammar forces comes with decoding."""
    return "prefill" if seq.num_scheduled_tokens < max(seq.prompt_len, seq.reported_len) else "decode"


def _sequence(seq: Sequence, state: SequenceState, now: float, wait: float = 0.0) -> InspectedSequence:
    return InspectedSequence(
        seq.client.hex(),
        seq.request_id,
        state,
        seq.row,
        seq.prompt_len,
        seq.generated,
        seq.num_scheduled_tokens,
        len(seq.pages),
        seq.num_shared_pages,
        seq.num_cached_tokens,
        seq.priority,
        seq.preemptions,
        now - seq.arrival,
        seq.session,
        wait,
    )
