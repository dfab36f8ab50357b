"""I9: the host's counts of a sequence bracket the length that the device knows."""

import pytest

from tandem.engine_core.scheduler.audit import audit_lengths
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tests.support.refusals import numbers_in
from tests.support.scheduling import added, commit, launched, new, sequence


@pytest.fixture
def seq() -> Sequence:
    return sequence(1, prompt=5)


def begun(seq: Sequence, steps: int) -> Scheduler:
    """Launch steps of three positions at most, and commit none of them."""
    scheduler = new(rows=3, step=3)
    added(scheduler, seq)
    for step_id in range(1, steps + 1):
        launched(scheduler, step_id)
    return scheduler


def test_a_prompt_is_not_compared_before_its_last_chunk(seq: Sequence) -> None:
    begun(seq, 1)
    assert audit_lengths([seq], [1, 3]) == []


@pytest.mark.parametrize(("length", "found"), [(6, 1), (7, 0), (8, 1)])
def test_two_samples_in_flight_are_two_tokens(seq: Sequence, length: int, found: int) -> None:
    begun(seq, 3)
    assert (seq.min_device_len, seq.max_device_len) == (7, 7)
    assert len(audit_lengths([seq], [1, length])) == found


def test_a_step_that_waits_for_its_mask_has_brought_no_token_yet(seq: Sequence) -> None:
    begun(seq, 3)
    assert audit_lengths([seq], [1, 6], {seq.id}) == []
    assert len(audit_lengths([seq], [1, 5], {seq.id})) == 1


def test_counts_are_exact_when_nothing_is_in_flight(seq: Sequence) -> None:
    scheduler = new()
    added(scheduler, seq)
    commit(scheduler, launched(scheduler, 1), [20])
    assert audit_lengths([seq], [1, 6]) == []
    for length in (5, 7):
        (problem,) = audit_lengths([seq], [1, length])
        assert numbers_in(problem)[-3:] == [length, 6, 6]


def test_a_sequence_that_has_ended_is_not_compared(seq: Sequence) -> None:
    scheduler = begun(seq, 3)
    scheduler.abort(seq.client, seq.request_id)
    assert audit_lengths([seq], [1, 3]) == []
