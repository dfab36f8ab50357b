"""How often a request may be submitted again."""

import pytest

from tandem.frontend.generation.attempts import Attempts


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
    attempts = Attempts()
    assert [attempts.lose(had_run) for had_run in losses] == allowed
