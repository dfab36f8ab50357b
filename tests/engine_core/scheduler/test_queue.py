"""Order of the waiting queue, and the bound on overtaking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.scheduler.queue import ARRIVALS_PER_PRIORITY, RunningSequences, WaitingQueue
from tandem.engine_core.sequence import Sequence
from tandem.protocol.params import SamplingParams
from tests.support.scheduling import submitted


def new(number: int, priority: int = 0) -> Sequence:
    return submitted(number, [1], SamplingParams(1), priority=priority)


def order(queue: WaitingQueue) -> list[int]:
    return [seq.id for seq in queue]


def filled(by_priority: bool, *priorities: int) -> WaitingQueue:
    queue = WaitingQueue(by_priority)
    for number, priority in enumerate(priorities):
        queue.push(new(number, priority))
    return queue


def test_queue_is_ordered_by_arrival_without_priorities() -> None:
    assert order(filled(False, 0, 5, -5)) == [0, 1, 2]
    assert order(filled(True, 0, 5, -5)) == [1, 0, 2]


def test_reorder_changes_the_order_at_run_time() -> None:
    queue = filled(False, 0, 5, -5)
    queue.reorder(True)
    assert order(queue) == [1, 0, 2]
    queue.reorder(False)
    assert order(queue) == [0, 1, 2]


def test_returning_sequence_takes_its_old_position() -> None:
    queue = filled(False, 0, 0, 0)
    first = next(iter(queue))
    queue.remove(first)
    queue.push(first)
    assert order(queue) == [0, 1, 2]


def test_sequence_preempted_for_priority_does_not_return_to_the_head() -> None:
    queue, low = filled(False, 0, 0, 0), new(-1, -1)
    queue.push(low)
    assert order(queue)[0] == -1
    queue.remove(low)
    low.restart()
    queue.push(low)
    assert order(queue)[-1] == -1
    queue.remove(low)
    assert order(queue) == [0, 1, 2]


def test_longest_waiting_ignores_the_order() -> None:
    """The start of the wait counts, not the arrival nor the order of insertion."""
    queue = WaitingQueue(by_priority=True)
    sequences = [new(number, number) for number in range(4)]
    for seq, came in zip(sequences, (30.0, 20.0, 20.0, 10.0), strict=True):
        seq.queued_at = came
        queue.push(seq)
    seen = []
    while queue.longest_waiting is not None:
        seen.append(queue.longest_waiting.id)
        queue.remove(queue.longest_waiting)
    assert seen == [3, 1, 2, 0]


def test_removing_an_absent_sequence_raises() -> None:
    with pytest.raises(KeyError):
        filled(False, 0).remove(new(9))


def test_queue_may_change_during_iteration() -> None:
    queue = filled(True, 1, 2, 3)
    for seq in queue:
        queue.remove(seq)
    assert not len(queue)
    assert queue.longest_waiting is None


@given(st.integers(-3, 3), st.integers(1, 3))
def test_no_sequence_is_overtaken_indefinitely(low: int, above: int) -> None:
    """The stated bound holds however many sequences of a higher priority keep coming."""
    queue = WaitingQueue(by_priority=True)
    patient = new(0, low)
    queue.push(patient)
    overtaken = 0
    for number in range(1, 4 * ARRIVALS_PER_PRIORITY * above):
        queue.push(new(number, low + above))
        head = next(iter(queue))
        queue.remove(head)
        if head is patient:
            break
        overtaken += 1
    assert overtaken == ARRIVALS_PER_PRIORITY * above - 1


@given(st.lists(st.tuples(st.integers(-9, 9), st.booleans()), max_size=40))
def test_queue_equals_a_sorted_list(arrivals: list[tuple[int, bool]]) -> None:
    queue = WaitingQueue(by_priority=True)
    kept = []
    for number, (priority, goes) in enumerate(arrivals):
        seq = new(number, priority)
        queue.push(seq)
        kept.append(seq)
        if goes:
            queue.remove(kept.pop(len(kept) // 2))
    assert order(queue) == [s.id for s in sorted(kept, key=lambda s: (s.id - ARRIVALS_PER_PRIORITY * s.priority, s.id))]
    assert len(queue) == len(kept)


def test_a_sequence_that_was_preempted_from_among_none_jumps_over_no_sample_in_flight() -> None:
    assert RunningSequences().min_jump == 1
