"""When a child is started again, and when it is given up."""

import pytest

from tandem.frontend.supervisor.restart_policy import (
    FIRST_BACKOFF,
    LAST_BACKOFF,
    MAX_FAILED_STARTS,
    STEADY_SECONDS,
    Exit,
    RestartPolicy,
    Verdict,
)
from tandem.protocol.errors import ExitCode


def fail(policy: RestartPolicy, code: int, failure: str = "") -> Verdict:
    return policy.after(Exit(code, False, 0.1, failure), "the child")


def test_pauses_double_up_to_the_longest() -> None:
    policy = RestartPolicy()
    policy.mark_ready()
    pauses = [fail(policy, 1).restart_after for _ in range(7)]
    assert pauses == [FIRST_BACKOFF, 1.0, 2.0, 4.0, 8.0, LAST_BACKOFF, LAST_BACKOFF]


def test_pauses_start_over_after_a_steady_time() -> None:
    policy = RestartPolicy()
    for _ in range(3):
        policy.mark_ready()
        assert policy.after(Exit(-9, True, STEADY_SECONDS + 1), "the child").restart_after == FIRST_BACKOFF
    assert policy.after(Exit(-9, True, STEADY_SECONDS), "the child").restart_after == 2 * FIRST_BACKOFF


@pytest.mark.parametrize("codes", [[7, 7, 7], [7, 7, 8, 7, 8, 8, 8], [-9, -9, -9]], ids=str)
def test_a_child_that_fails_to_start_three_times_the_same_way_is_given_up(codes: list[int]) -> None:
    policy = RestartPolicy()
    verdicts = [fail(policy, code, "no kernel") for code in codes]
    assert all(verdict.restart_after is not None for verdict in verdicts[:-1])
    last = verdicts[-1]
    assert (last.restart_after, last.exit_code, last.level) == (None, ExitCode.FATAL, "error")
    status = f"exit code {codes[-1]}" if codes[-1] > 0 else "signal SIGKILL"
    assert f" {MAX_FAILED_STARTS} " in last.line and status in last.line and "no kernel" in last.line


@pytest.mark.parametrize("earlier_failures", [0, 1, 2])
def test_settings_that_cannot_work_end_the_service_before_the_child_was_ready(earlier_failures: int) -> None:
    policy = RestartPolicy()
    for _ in range(earlier_failures):
        fail(policy, 70)
    verdict = fail(policy, ExitCode.CONFIG)
    assert (verdict.restart_after, verdict.exit_code) == (None, ExitCode.CONFIG)
    # The first message of the child itself says it all.
    assert verdict.level == ("error" if earlier_failures else "debug")


@pytest.mark.parametrize("code", [0, 1, ExitCode.CONFIG, ExitCode.FATAL, -9])
def test_a_child_that_was_ever_ready_is_always_started_again(code: int) -> None:
    policy = RestartPolicy()
    policy.mark_ready()
    for _ in range(3 * MAX_FAILED_STARTS):
        verdict = fail(policy, code)
        assert verdict.restart_after is not None
        assert verdict.exit_code is ExitCode.OK


def test_a_later_failure_of_the_settings_says_that_they_worked_before() -> None:
    policy = RestartPolicy()
    policy.mark_ready()
    line = fail(policy, ExitCode.CONFIG).line
    assert "exit code 2" in line and "0.5 s" in line
    line = fail(policy, -9).line
    assert "SIGKILL" in line and "1.0 s" in line
