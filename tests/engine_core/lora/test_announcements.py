"""Answers to changes of the adapters, which wait for the frontends."""

import pytest

from tandem.engine_core.lora.adapters import CallResult
from tandem.engine_core.lora.announcements import MAX_SECONDS, Announcements
from tests.fakes.clock import FakeClock

CALLER, OTHER, THIRD = b"caller", b"other", b"third"
CLIENTS = (CALLER, OTHER, THIRD)
LOADED = CallResult(CALLER, 1)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def announcements(clock: FakeClock) -> Announcements:
    found = Announcements(clock)
    for client in CLIENTS:
        found.note(client, 4)
    return found


def test_a_result_waits_for_every_other_frontend(announcements: Announcements) -> None:
    announcements.add(LOADED, 5)
    assert announcements.take(CLIENTS) == []
    announcements.note(OTHER, 5)
    assert announcements.take(CLIENTS) == []
    announcements.note(THIRD, 6)
    assert announcements.take(CLIENTS) == [LOADED]
    assert announcements.take(CLIENTS) == []


def test_a_plain_renewal_says_nothing_about_adapters(announcements: Announcements) -> None:
    announcements.note(OTHER, 5)
    announcements.note(OTHER, -1)
    announcements.add(LOADED, 5)
    assert announcements.take((CALLER, OTHER)) == [LOADED]


def test_a_frontend_that_is_gone_is_not_waited_for(announcements: Announcements) -> None:
    announcements.add(LOADED, 5)
    announcements.note(OTHER, 5)
    announcements.forget(THIRD)
    assert announcements.take((CALLER, OTHER)) == [LOADED]


def test_a_frontend_that_says_nothing_delays_a_result_by_a_bounded_time(
    announcements: Announcements, clock: FakeClock
) -> None:
    announcements.add(LOADED, 5)
    clock.advance(MAX_SECONDS / 2)
    later = CallResult(OTHER, 1)
    announcements.add(later, 6)
    assert announcements.take(CLIENTS) == []
    clock.advance(MAX_SECONDS / 2)
    assert announcements.take(CLIENTS) == [LOADED]
    clock.advance(MAX_SECONDS / 2)
    assert announcements.take(CLIENTS) == [later]


def test_a_failure_is_given_out_at_once(announcements: Announcements) -> None:
    failed = CallResult(CALLER, 2, "no such file")
    announcements.add(LOADED, 5)
    announcements.add(failed, 5)
    assert announcements.take(CLIENTS) == [failed]
