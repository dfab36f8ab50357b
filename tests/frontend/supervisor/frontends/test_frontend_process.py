"""One process of a frontend: what it is told when it has to end."""

from tandem.frontend.control_channel import Beat, Drain, End
from tandem.frontend.supervisor.frontends.frontend_process import FrontendProcess
from tests.fakes.clock import FakeClock
from tests.fakes.frontend_child import FakeFrontendChild


def started() -> tuple[FrontendProcess, FakeFrontendChild]:
    child = FakeFrontendChild(0, 1, lambda _: None, lambda _: None)
    return FrontendProcess(0, child, FakeClock()), child


def test_process_that_has_served_is_told_to_end_also_while_it_drains() -> None:
    process, child = started()
    process.hear(Beat("serving", (0,)))
    process.drain(0.0, 25.0)
    process.end()
    assert (child.sent, child.is_killed) == ([Drain(0.0, 25.0), End()], False)


def test_process_that_has_not_served_yet_is_killed() -> None:
    process, child = started()
    process.end()
    assert (child.sent, child.is_killed, process.is_draining) == ([], True, True)
