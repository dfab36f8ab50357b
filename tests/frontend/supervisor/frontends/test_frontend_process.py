"""One process of a frontend: what it is told when it has to end."""

from tandem.frontend.control_channel import Beat, Drain, End
from tandem.frontend.supervisor.frontends.frontend_process import FrontendProcess
from tests.fakes.clock import FakeClock
from tests.fakes.frontend_child import FakeFrontendChild


def started() -> tuple[FrontendProcess, FakeFrontendChild]:
    child = FakeFrontendChild(0, 1, lambda _: None, lambda _: None)
    return FrontendProcess(0, child, FakeClock()), child


def test_process_that_was_heard_is_told_to_end_also_while_it_drains() -> None:
    process, child = started()
    process.record(Beat("serving", (0,)))
    process.drain(0.0, 25.0)
    process.end()
    assert (child.sent, child.is_killed) == ([Drain(0.0, 25.0), End()], False)


def test_process_that_was_not_heard_yet_is_killed() -> None:
    for stop in (FrontendProcess.end, lambda process: process.drain(0.0, 25.0)):
        process, child = started()
        stop(process)
        assert (child.sent, child.is_killed, process.is_draining) == ([], True, True)


def test_process_that_may_serve_since_its_last_beat_is_drained() -> None:
    process, child = started()
    process.record(Beat("starting"))
    process.drain(0.0, 25.0)
    assert (child.sent, child.is_killed) == ([Drain(0.0, 25.0)], False)
