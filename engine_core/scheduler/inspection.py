"""Snapshots of the scheduler for its operators, and its gauges."""

from collections.abc import Iterable

from tandem.engine_core.kv_cache.manager import KVManager, Leaving
from tandem.engine_core.kv_cache.sessions import Session, split_scoped
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.commands import PauseMode
from tandem.protocol.events import InspectedSequence, InspectedSession, Inspection, SequenceState, Speculation
from tandem.protocol.stats import EngineStats

MAX_LISTED = 256
"""Waiting requests that an inspection lists; the others are only counted."""


def inspect(
    scheduler: Scheduler,
    call: int,
    stats: EngineStats,
    now: float,
    pause_mode: PauseMode | None = None,
    refuses_new: bool = False,
) -> Inspection:
    """Return a snapshot of the scheduler, which stays as it is.

    call: number of the command that is answered; stats: counters of the engine, sent along; now: seconds; pause_mode,
    refuses_new: of the pause in force.
    """
    memory = scheduler.memory
    waiting = [*scheduler.waiting, *scheduler.compiling.values()]
    running = list(scheduler.running.values())
    others = [seq for seq in scheduler.held if seq.id not in scheduler.running]
    sequences = [_sequence(memory, seq, _state(seq), now) for seq in running]
    sequences += [_sequence(memory, seq, "leaving" if seq.outcome is None else "zombie", now) for seq in others]
    for seq in waiting[:MAX_LISTED]:
        state: SequenceState = "compiling" if seq.compiling else "following" if memory.follows(seq) else "waiting"
        sequences.append(_sequence(memory, seq, state, now, now - seq.queued_at))
    return Inspection(
        call,
        scheduler.policy,
        stats,
        memory.pages.free,
        _releasing(memory, others),
        sequences,
        [_session(memory, session, now) for session in memory.sessions.known],
        max(0, len(waiting) - MAX_LISTED),
        pause_mode,
        refuses_new,
        _speculation(scheduler.planner.drafts),
    )


def copy_gauges(scheduler: Scheduler, stats: EngineStats, now: float) -> None:
    """Copy the gauges into the stats; now: seconds."""
    memory = scheduler.memory
    usage = memory.usage
    stats.running = len(scheduler.running)
    stats.queued_prompt_tokens = scheduler.queued.num_tokens
    stats.waiting = len(scheduler.waiting) + len(scheduler.compiling)
    stats.pages_used, stats.pages_cached, stats.pages_evicted = usage.in_use, usage.cached, usage.num_evicted
    if memory.states is not None:
        slots = memory.states.slots
        stats.state_slots, stats.state_slots_used, stats.states_evicted = slots.total, slots.used, slots.num_evicted
    stats.prefix_queries, stats.prefix_hits = memory.num_queried_tokens, memory.num_hit_tokens
    stats.preemptions = scheduler.preemptions
    stats.sessions, stats.sessions_evicted = len(memory.sessions), memory.sessions.num_evicted
    stats.oldest_wait = oldest_wait(scheduler, now)
    if scheduler.adapters is not None:
        stats.lora_requests, stats.lora_rows = scheduler.adapters.num_open, scheduler.adapters.num_rows
        stats.max_loras = scheduler.adapters.max_slots


def oldest_wait(scheduler: Scheduler, now: float) -> float:
    """Return the longest wait in the queue, in seconds; 0 if the queue is empty.

    Sequences with a grammar in compilation count as waiting.
    """
    firsts = (scheduler.waiting.longest_waiting, next(iter(scheduler.compiling.values()), None))
    return max([0.0, *(now - seq.queued_at for seq in firsts if seq is not None)])


def _releasing(memory: KVManager, leaving: Iterable[Sequence]) -> int:
    """Return the number of pages that come back with these sequences.

    They come back once no step in flight holds the sequences.
    """
    readers = Leaving()
    return sum([memory.add_leaving(seq, readers) for seq in leaving])


def _state(seq: Sequence) -> SequenceState:
    """Return the state of a running sequence.

    Tokens computed again after a preemption count as a prompt, tokens that a grammar forces as decoding.
    """
    return "prefill" if seq.num_scheduled_tokens < max(seq.prompt_len, seq.wire.reported_len) else "decode"


def _sequence(
    memory: KVManager, seq: Sequence, state: SequenceState, now: float, wait: float = 0.0
) -> InspectedSequence:
    """Return one sequence as an inspection shows it.

    now, wait: seconds.
    """
    return InspectedSequence(
        seq.client.hex(),
        seq.request_id,
        state,
        seq.row,
        seq.prompt_len,
        seq.generated,
        seq.num_scheduled_tokens,
        seq.num_pages,
        memory.num_shared_pages(seq),
        seq.cache.num_cached_tokens,
        seq.priority,
        seq.preemptions,
        now - seq.arrival,
        split_scoped(seq.submit.session)[1],
        wait,
        seq.submit.http_request_id,
        seq.submit.key.name if seq.submit.key is not None else "",
        seq.drafts.drafted,
        seq.drafts.accepted,
        seq.submit.adapter,
    )


def _speculation(drafts: DraftPolicy) -> Speculation | None:
    """Return how steps draft tokens, with the method's name in vLLM; None if none does."""
    method = "draft_model" if drafts.has_model else "ngram"
    return Speculation(method, drafts.most, drafts.fixed is None) if drafts.most else None


def _session(memory: KVManager, session: Session, now: float) -> InspectedSession:
    """Return one session as an inspection shows it."""
    key, name = split_scoped(session.name)
    idle = now - session.idle_since if session.turn is None else 0.0
    return InspectedSession(name, session.turn is not None, memory.num_kept_pages(session), idle, key)
