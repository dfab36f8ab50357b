"""Order, patience and end of the requests that wait for an engine."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.engine.held_requests import SAME_LINK_SECONDS, HeldRequests
from tandem.frontend.errors import ApiError, unavailable


class Request:
    """A held request that records what becomes of it."""

    def __init__(self, log: list["Request"], had_run: bool = False, arrived: float = 0.0) -> None:
        self.log, self.had_run, self.arrived = log, had_run, arrived
        self.error: ApiError | None = None
        self.problem: Exception | None = None
        self.deadly: frozenset[int] = frozenset()
        """Sequences that must not turn out to have run."""

    def note_launched(self, request_ids: frozenset[int]) -> bool:
        return self.deadly.isdisjoint(request_ids)

    def resubmit(self) -> None:
        if self.problem is not None:
            raise self.problem
        self.log.append(self)

    def give_up(self, error: ApiError) -> None:
        assert self.error is None
        self.error = error


@given(st.permutations(list(itertools.product([False, True], [1.0, 2.0, 3.0]))))
def test_waiting_requests_come_before_those_that_had_run_and_the_oldest_first(order: list[tuple[bool, float]]) -> None:
    log: list[Request] = []
    held = HeldRequests(60.0)
    for had_run, arrived in order:
        held.add(Request(log, had_run, arrived), 1, 0.0, 0.0)
    assert held.resubmit(2, 0.0) == 6
    assert [(one.had_run, one.arrived) for one in log] == sorted(order)
    assert len(held) == 0


def test_requests_that_turn_out_to_have_run_too_often_are_held_no_longer() -> None:
    log: list[Request] = []
    held = HeldRequests(60.0)
    guilty, innocent = Request(log), Request(log)
    guilty.deadly, innocent.deadly = frozenset({1, 2}), frozenset({3})
    for request in (guilty, innocent):
        held.add(request, 1, 0.0, 0.0)
    held.note_launched(frozenset({2, 4}))
    assert held.resubmit(2, 0.0) == 1
    assert log == [innocent]


def test_a_request_returns_to_the_link_that_it_was_lost_on_only_after_a_while() -> None:
    log: list[Request] = []
    held = HeldRequests(60.0)
    held.add(Request(log), 1, 10.0, 10.0)
    assert held.resubmit(1, 10.0 + SAME_LINK_SECONDS / 2) == 0
    assert held.resubmit(1, 10.0 + SAME_LINK_SECONDS) == 1


def test_requests_that_an_engine_lost_again_at_once_stay_held() -> None:
    log: list[Request] = []
    held = HeldRequests(60.0)
    requests = [Request(log, arrived=float(number)) for number in range(4)]
    for request in requests:
        held.add(request, 1, 0.0, 0.0)
    requests[2].problem = unavailable("away again")
    assert held.resubmit(2, 1.0) == 2
    assert (log, len(held)) == (requests[:2], 2)
    requests[2].problem = None
    assert held.resubmit(3, 2.0) == 2
    assert log == requests


def test_a_request_that_cannot_be_submitted_does_not_keep_the_others() -> None:
    log: list[Request] = []
    held = HeldRequests(60.0)
    broken, sound = Request(log, arrived=1.0), Request(log, arrived=2.0)
    broken.problem = ValueError("a bug")
    for request in (broken, sound):
        held.add(request, 1, 0.0, 0.0)
    held.resubmit(2, 1.0)
    assert (log, len(held)) == ([sound], 0)
    assert broken.error is not None and broken.error.status == 500


def test_a_request_is_given_up_after_the_timeout_and_once() -> None:
    held = HeldRequests(60.0)
    early, late, gone = Request([]), Request([]), Request([])
    held.add(early, 1, 0.0, 0.0)
    held.add(gone, 1, 0.0, 0.0)
    held.add(late, 1, 30.0, 30.0)
    held.discard(gone)
    held.expire(59.9, lambda: unavailable("away"))
    assert early.error is None
    held.expire(60.0, lambda: unavailable("away"))
    assert early.error is not None and (late.error, gone.error) == (None, None)
    held.give_up_all(unavailable("shut down"))
    assert late.error is not None and late.error.message == "shut down"
    assert len(held) == 0
