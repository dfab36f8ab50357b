"""State of a pause: when it is complete, and who is answered."""

import pytest

from tandem.engine_core.scheduler.pause import PauseSwitch
from tandem.protocol.commands import PAUSE_MODES, Pause, PauseMode
from tandem.protocol.events import Answer


def test_engine_that_was_never_paused_holds_nothing() -> None:
    pause = PauseSwitch()
    assert (pause.holds_rows, pause.refuses_new, pause.needs_report) == (False, False, False)
    assert not pause.is_complete(0, 0)
    assert pause.take_answers(False) == []


@pytest.mark.parametrize(
    ("mode", "in_flight", "running", "complete"),
    [
        *[(mode, 1, 0, False) for mode in PAUSE_MODES],
        *[(mode, 0, 0, True) for mode in PAUSE_MODES],
        ("keep", 0, 3, True),
        ("abort", 0, 3, True),
        ("wait", 0, 3, False),
    ],
)
def test_pause_is_complete_when_nothing_of_its_mode_goes_on(
    mode: PauseMode, in_flight: int, running: int, complete: bool
) -> None:
    pause = PauseSwitch()
    pause.begin(b"a", Pause(1, mode))
    assert pause.is_complete(in_flight, running) is complete
    assert pause.holds_rows is (mode != "wait")


def test_every_call_is_answered_once() -> None:
    pause = PauseSwitch()
    pause.begin(b"a", Pause(1, "wait"))
    pause.begin(b"b", Pause(1, "keep", True))
    assert (pause.mode, pause.refuses_new) == ("keep", True), "the last command is in force"
    assert pause.take_answers(False) == []
    assert pause.take_answers(True) == [(b"a", Answer(1, True)), (b"b", Answer(1, True))]
    assert pause.take_answers(True) == []
    assert pause.needs_report


def test_calls_that_a_resume_overtakes_are_answered() -> None:
    pause = PauseSwitch()
    pause.begin(b"a", Pause(1, "wait", True))
    pause.end(b"b", 2)
    assert (pause.mode, pause.refuses_new, pause.needs_report) == (None, False, True)
    (resumer, resumed), (pauser, refused) = pause.take_answers(False)
    assert (resumer, resumed) == (b"b", Answer(2, True))
    assert (pauser, refused.call, refused.ok) == (b"a", 1, False) and "resumed" in refused.message
    assert not pause.needs_report


def test_resume_is_answered_although_another_pause_has_begun() -> None:
    pause = PauseSwitch()
    pause.end(b"a", 1)
    pause.begin(b"b", Pause(2, "wait"))
    assert pause.take_answers(False) == [(b"a", Answer(1, True))]
    assert pause.take_answers(True) == [(b"b", Answer(2, True))]


def test_calls_of_a_frontend_that_is_gone_are_dropped_and_the_pause_stays() -> None:
    pause = PauseSwitch()
    pause.begin(b"a", Pause(1, "keep"))
    pause.begin(b"b", Pause(2, "keep"))
    pause.end(b"a", 3)
    pause.begin(b"b", Pause(4, "keep"))
    pause.forget(b"a")
    assert pause.mode == "keep"
    assert pause.take_answers(True) == [(b"b", Answer(2, True)), (b"b", Answer(4, True))]


def test_a_pause_leaves_nothing_to_the_time_after_it() -> None:
    pause = PauseSwitch()
    pause.begin(b"f", Pause(1, "keep", True, clear_cache=False))
    pause.end(b"f", 2)
    assert (pause.mode, pause.refuses_new, pause.clear_cache) == (None, False, True)
