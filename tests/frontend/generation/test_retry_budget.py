"""How often a request may be submitted again."""

import pytest

from tandem.frontend.generation.retry_budget import RetryBudget
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure

LOSS = Failure(1, ErrorCode.ENGINE_UNAVAILABLE, "gone")


@pytest.mark.parametrize(
    ("losses", "allowed"),
    [
        ([False, False, False], [True, True, False]),
        ([True, True], [True, False]),
        ([False, True, False], [True, True, False]),
        ([True, False, False], [True, True, False]),
        ([False, True, True], [True, True, False]),
        ([True, False, True], [True, True, False]),
    ],
)
def test_a_request_is_sent_to_three_engines_and_runs_in_at_most_two(losses: list[bool], allowed: list[bool]) -> None:
    budget = RetryBudget()
    assert [budget.lose(LOSS, had_run, [number]) for number, had_run in enumerate(losses)] == allowed


def test_an_engine_that_had_begun_a_request_without_a_word_counts_once() -> None:
    budget = RetryBudget()
    budget.lose(LOSS, False, [1, 2])
    assert budget.note_launched(frozenset({3})) is None
    assert budget.num_running_losses == 0, "others were launched"
    for _ in range(2):
        assert budget.note_launched(frozenset({2, 3})) is None
        assert budget.num_running_losses == 1
    assert not budget.lose(LOSS, True, [4, 5])


def test_a_request_ends_when_the_second_engine_turns_out_to_have_begun_it() -> None:
    budget = RetryBudget()
    budget.lose(LOSS, True, [1])
    assert budget.note_launched(frozenset({1})) is None, "that is known"
    assert budget.lose(LOSS, False, [2])
    assert budget.note_launched(frozenset({2})) == LOSS
