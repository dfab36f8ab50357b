"""Slots of frontends under a clock and children of the test's own."""

import asyncio
import copy
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.frontend.control_channel import Accept, Drain, Metrics, Totals
from tandem.frontend.metrics.families import Family, Sample
from tandem.frontend.metrics.reports import Report
from tandem.frontend.supervisor.frontends.frontend_process import EXTRA_STOP_SECONDS, START_SECONDS
from tandem.frontend.supervisor.frontends.frontends import Frontends
from tandem.frontend.supervisor.frontends.stall_aware_clock import MAX_LAG, TICK_SECONDS, StallAwareClock
from tandem.frontend.supervisor.restart_policy import FIRST_BACKOFF, LAST_BACKOFF
from tandem.protocol.errors import ExitCode
from tests.fakes.clock import FakeClock
from tests.fakes.frontend_child import FakeFrontendChild, FakeFrontendChildren
from tests.support.effort import machine
from tests.support.refusals import numbers_in

HANG, DRAIN = 8.0, 25.0


class Service:
    """Frontends of fake children, which obey unless the test says otherwise."""

    def __init__(self, count: int) -> None:
        self.clock = FakeClock()
        self.children = FakeFrontendChildren()
        self.frontends = Frontends(count, self.children, HANG, DRAIN, StallAwareClock(self.clock))
        self.mute: set[FakeFrontendChild] = set()
        """Children that send no beats."""

    def tick(self) -> None:
        self.clock.advance(TICK_SECONDS)
        self.frontends.tick()

    def run(self, seconds: float) -> None:
        """Let time pass while all children that are not mute send beats; killed ones end."""
        for _ in range(round(seconds / TICK_SECONDS)):
            self.tick()
            for child in self.children.running:
                if child.is_killed:
                    child.ends(-9)
                elif child not in self.mute:
                    child.beats("draining" if child.drains else "serving")

    def accepts(self) -> dict[int, tuple[int, ...]]:
        """Return the slots that the newest child of each slot accepts from."""
        return {slot.number: self.children.of(slot.number).accepts for slot in self.frontends.slots}


def serving(count: int) -> Service:
    service = Service(count)
    service.run(1.0)
    return service


def test_every_slot_is_started_and_accepts_from_its_own_socket() -> None:
    service = serving(3)
    assert [child.slot for child in service.children.started] == [0, 1, 2]
    assert service.accepts() == {0: (0,), 1: (1,), 2: (2,)}
    assert service.frontends.num_serving == 3


def test_the_first_frontend_tries_the_settings_before_the_others_are_started() -> None:
    service = Service(3)
    service.tick()
    service.tick()
    assert [child.slot for child in service.children.started] == [0]
    service.children.of(0).beats("starting")
    service.tick()
    assert [child.slot for child in service.children.started] == [0, 1, 2]


def starting(count: int) -> Service:
    service = Service(count)
    service.tick()
    service.children.of(0).beats("starting")
    service.tick()
    return service


def test_the_first_to_serve_accepts_for_all_until_they_serve() -> None:
    service = starting(3)
    service.children.of(1).beats()
    assert service.accepts() == {0: (0,), 1: (0, 1, 2), 2: (2,)}
    service.children.of(0).beats()
    assert service.accepts() == {0: (0, 2), 1: (1, 2), 2: (2,)}
    service.children.of(2).beats()
    assert service.accepts() == {0: (0,), 1: (1,), 2: (2,)}


def test_siblings_accept_for_a_killed_frontend_at_once_until_its_successor_serves() -> None:
    service = serving(3)
    service.children.of(1).ends(-9)
    assert service.children.of(0).accepts == (0, 1)
    assert service.children.of(2).accepts == (1, 2)
    assert service.frontends.num_serving == 2
    service.run(FIRST_BACKOFF + 2 * TICK_SECONDS)
    assert [child.slot for child in service.children.started] == [0, 1, 2, 1]
    assert service.accepts() == {0: (0,), 1: (1,), 2: (2,)}
    assert [sum(slot.restarts.values()) for slot in service.frontends.slots] == [0, 1, 0]


def test_siblings_accept_for_a_silent_frontend_long_before_it_is_killed() -> None:
    service = serving(2)
    hung = service.children.of(1)
    service.mute.add(hung)
    service.run(1.5)
    assert service.children.of(0).accepts == (0, 1)
    assert not hung.is_killed
    service.mute.remove(hung)
    service.run(0.5)
    assert service.accepts() == {0: (0,), 1: (1,)}


def report(tokens: float, running: float, scrape: int = 0) -> Metrics:
    counter = Family("tokens", "Tokens.", "counter", (Sample("tokens_total", (), tokens),))
    gauge = Family("running", "Running.", "gauge", (Sample("running", (), running),))
    return Metrics(Report(others=(counter, gauge)), scrape)


def test_a_scrape_is_answered_with_the_sums_of_all_processes_and_ended_ones_stay_in_them() -> None:
    service = serving(2)
    first, second = service.children.of(0), service.children.of(1)
    first.says(report(3, 1))
    second.says(report(4, 2))
    second.ends(-9)
    first.says(report(5, 1, scrape=7))
    service.run(FIRST_BACKOFF + 2 * TICK_SECONDS)
    service.children.of(1).says(report(1, 1, scrape=8))
    (before,) = (message for message in first.sent if isinstance(message, Totals))
    (after,) = (message for message in service.children.of(1).sent if isinstance(message, Totals))
    assert (before.scrape, after.scrape) == (7, 8)
    assert "\ntokens_total 9.0\n" in before.text
    assert "\nrunning 1.0\n" in before.text
    assert "\ntokens_total 10.0\n" in after.text
    assert "\nrunning 2.0\n" in after.text
    assert service.frontends.exposition.text() == after.text


def test_a_hung_frontend_is_killed_after_the_hang_timeout_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    service = serving(2)
    hung = service.children.of(1)
    service.mute.add(hung)
    service.run(HANG)
    assert not hung.is_killed
    service.run(0.5)
    assert hung.is_killed
    assert any({101, 8} <= set(map(int, numbers_in(line))) and "frontend-1" in line for line in caplog.messages)
    service.run(2.0)
    assert service.frontends.num_serving == 2
    assert caplog.text.count("is killed") == 1


def test_a_starting_frontend_may_be_silent_for_long() -> None:
    service = Service(1)
    service.tick()
    child = service.children.of(0)
    service.mute.add(child)
    service.run(START_SECONDS - 1)
    assert not child.is_killed
    service.run(2)
    assert child.is_killed


@pytest.mark.parametrize("pause", [MAX_LAG + 1, 3600.0])
def test_a_supervisor_that_was_stopped_kills_nobody(pause: float) -> None:
    service = serving(3)
    for _ in range(5):
        service.clock.advance(pause)
        service.frontends.tick()
        assert not any(child.is_killed for child in service.children.started)
        service.run(0.25)
    assert service.frontends.num_serving == 3


def test_a_leaving_frontend_drains_when_its_successor_serves() -> None:
    service = serving(2)
    old = service.children.of(0)
    old.leaves()
    new = service.children.of(0)
    assert new is not old
    assert old.sent[-1] == Accept((0,)), "the answer to its request"
    new.beats("starting")
    service.run(0)
    assert not old.drains
    assert service.children.of(1).accepts == (1,), "the old one still serves"
    new.beats()
    assert old.drains == [Drain(0.0, DRAIN)]
    old.ends()
    service.run(1)
    assert len(service.children.started) == 3
    assert service.frontends.num_serving == 2


def test_a_leaving_frontend_serves_on_while_its_successors_fail() -> None:
    service = serving(1)
    old = service.children.of(0)
    old.leaves()
    service.children.of(0).ends(1)
    service.tick()
    old.beats()
    assert not old.drains
    assert service.frontends.num_serving == 1
    service.run(FIRST_BACKOFF + 2 * TICK_SECONDS)
    assert old.drains == [Drain(0.0, DRAIN)]


def test_a_frontend_that_does_not_end_its_drain_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    service = serving(1)
    old = service.children.of(0)
    old.leaves()
    service.run(DRAIN + EXTRA_STOP_SECONDS - 1)
    assert not old.is_killed
    service.run(2)
    assert old.is_killed
    assert any("frontend-0" in line and 100 in numbers_in(line) for line in caplog.messages)


def test_frontends_that_all_leave_in_turn_are_all_replaced() -> None:
    service = serving(4)
    for slot in range(4):
        old = service.children.of(slot)
        old.leaves()
        service.run(1.0)
        assert old.drains
        old.ends()
    service.run(1.0)
    assert service.frontends.num_serving == 4
    assert len(service.children.running) == 4


def test_settings_that_cannot_work_end_the_service_before_any_frontend_was_ready() -> None:
    service = starting(2)
    service.children.of(1).ends(ExitCode.CONFIG)
    assert service.frontends.exit_code is ExitCode.CONFIG


def test_no_frontend_is_given_up_once_one_was_ready(caplog: pytest.LogCaptureFixture) -> None:
    service = starting(2)
    service.children.of(0).beats()
    for _ in range(6):
        service.children.of(1).ends(ExitCode.CONFIG)
        service.mute.add(service.children.of(1))
        service.run(LAST_BACKOFF + 1)
    assert service.frontends.exit_code is None
    assert any("frontend-1" in line and 2 in numbers_in(line) for line in caplog.messages)
    service.mute.clear()
    service.run(LAST_BACKOFF + 1)
    assert service.frontends.num_serving == 2


def test_a_stop_drains_all_at_once_and_kills_those_that_have_not_served() -> None:
    service = serving(2)
    service.children.of(1).ends(-9)
    service.run(FIRST_BACKOFF + TICK_SECONDS)
    starting = service.children.of(1)
    starting_again = starting.is_running

    async def body() -> None:
        stop = asyncio.create_task(service.frontends.stop(3.0, 7.0))
        await asyncio.sleep(0)
        assert service.children.of(0).drains == [Drain(3.0, 7.0)]
        assert not stop.done()
        for child in service.children.running:
            child.ends()
        await stop

    asyncio.run(asyncio.wait_for(body(), 120))
    assert starting_again
    assert not service.frontends.is_running
    service.run(20)
    assert not service.frontends.is_running


def test_supervise_starts_what_is_due_and_returns_once_all_have_ended() -> None:
    service = Service(2)

    async def body() -> None:
        supervised = asyncio.create_task(service.frontends.supervise())
        await asyncio.sleep(0)
        assert len(service.children.running) == 1
        service.frontends.kill()
        assert all(child.is_killed for child in service.children.started)
        for child in service.children.running:
            child.ends(-9)
        assert await supervised is ExitCode.OK

    asyncio.run(asyncio.wait_for(body(), 120))


def test_supervise_returns_the_code_of_a_frontend_that_is_given_up() -> None:
    service = Service(1)

    async def body() -> None:
        supervised = asyncio.create_task(service.frontends.supervise())
        await asyncio.sleep(0)
        service.children.of(0).ends(ExitCode.CONFIG)
        assert await supervised is ExitCode.CONFIG

    asyncio.run(asyncio.wait_for(body(), 120))


class FrontendsMachine(RuleBasedStateMachine):
    """Any order of beats, exits, requests to leave, silences and delays of the supervisor."""

    @initialize(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        self.service = serving(count)

    @rule(number=st.integers(0, 30), code=st.sampled_from([0, 1, 2, 70, -9, -11]))
    def one_ends(self, number: int, code: int) -> None:
        self.pick(number, lambda child: child.ends(code))

    @rule(number=st.integers(0, 30))
    def one_leaves(self, number: int) -> None:
        self.pick(number, FakeFrontendChild.leaves)

    @rule(number=st.integers(0, 30), status=st.sampled_from(["starting", "serving"]))
    def one_beats(self, number: int, status: str) -> None:
        self.pick(number, lambda child: child.beats(status if not child.drains else "draining"))

    @rule(number=st.integers(0, 30))
    def one_hangs(self, number: int) -> None:
        self.pick(number, self.service.mute.add)

    @rule(ticks=st.integers(1, 60))
    def time_passes(self, ticks: int) -> None:
        self.service.run(ticks * TICK_SECONDS)

    @rule(late=st.integers(1, 4000))
    def the_supervisor_is_held_up(self, late: int) -> None:
        """Compare a late tick with one on time: neither may kill, start or tell anyone more than the other."""
        on_time = copy.deepcopy(self.service)
        on_time.tick()
        self.service.clock.advance(MAX_LAG + late * TICK_SECONDS)
        self.service.tick()
        assert self.service.children.states() == on_time.children.states()
        self.service.run(TICK_SECONDS)

    def pick(self, number: int, act: Callable[[FakeFrontendChild], None]) -> None:
        running = [child for child in self.service.children.running if not child.is_killed]
        if running:
            act(running[number % len(running)])

    @precondition(lambda self: hasattr(self, "service"))
    @invariant()
    def a_ready_service_is_never_given_up(self) -> None:
        assert self.service.frontends.exit_code is None

    @precondition(lambda self: hasattr(self, "service"))
    @invariant()
    def every_socket_is_accepted_from_while_a_frontend_serves(self) -> None:
        frontends = self.service.frontends
        processes = [process for slot in frontends.slots for process in slot.processes if process.is_serving]
        accepted = {slot for process in processes for slot in process.child.accepts}  # type: ignore[attr-defined]
        assert not processes or accepted == set(range(len(frontends.slots)))

    @precondition(lambda self: hasattr(self, "service"))
    @invariant()
    def nobody_drains_before_its_successor_has_served(self) -> None:
        for child in self.service.children.started:
            later = [
                other for other in self.service.children.started if other.slot == child.slot and other is not child
            ]
            assert not child.drains or any(other.pid is None or other.pid > (child.pid or 0) for other in later)

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        service = self.service
        for child in list(service.mute):
            if child.is_running:
                child.ends(-9)
        service.mute.clear()
        service.run(2 * LAST_BACKOFF + 5)
        for child in service.children.running:
            if child.drains:
                child.ends()
        service.run(1)
        count = len(service.frontends.slots)
        assert service.frontends.num_serving == len(service.children.running) == count
        assert service.accepts() == {slot: (slot,) for slot in range(count)}


TestFrontendsMachine = FrontendsMachine.TestCase
TestFrontendsMachine.settings = machine(examples=10, steps=20)
