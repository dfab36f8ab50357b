"""Health of an engine judged from its heartbeats, with a clock of the test's own."""

from typing import Any

import pytest
from msgspec import structs

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.start_estimate import UNKNOWN_SECONDS
from tandem.protocol.events import Heartbeat, PauseFacts, Phase, WeightFacts
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock
from tests.support.refusals import numbers_in


def heartbeat(
    phase: Phase = Phase.READY,
    pending: int = 0,
    steps: int = 0,
    epoch: int = 1,
    percent: int = 100,
    changes: int = 0,
    start_seconds: float = 0.0,
) -> Heartbeat:
    paused = changes % 2
    stats = EngineStats(steps_launched=steps, steps_committed=steps, paused=paused, pause_changes=changes)
    stats.start_seconds = start_seconds
    return Heartbeat(epoch, phase, percent, "", pending, stats)


class Engine:
    """An engine's watch under a clock: `sends` passes a heartbeat, `at` returns the watch at that time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.watch = EngineWatch(beat_timeout=5.0, step_timeout=60.0, clock=self.clock)

    def at(self, now: float) -> EngineWatch:
        self.clock.now = now
        return self.watch

    def sends(self, sent: Heartbeat, now: float) -> None:
        self.at(now).observe(sent)


def test_health_before_the_first_heartbeat_is_waiting() -> None:
    assert Engine().at(1000.0).health().status == "waiting"
    assert Engine().at(1000.0).silence() == 0.0


def test_health_follows_the_phase() -> None:
    for phase, status in (
        (Phase.STARTING, "loading"), (Phase.LOADING, "loading"), (Phase.WARMING, "loading"), (Phase.READY, "ready"),
        (Phase.DRAINING, "draining"), (Phase.FAILED, "failed"),
    ):  # fmt: skip
        engine = Engine()
        engine.sends(heartbeat(phase, percent=40), 10.0)
        health = engine.at(10.0).health()
        assert (health.status, health.ready) == (status, phase is Phase.READY)
        assert health.percent == (40 if status == "loading" else None)


def test_silence_begins_after_the_timeout_and_ends_with_a_heartbeat() -> None:
    engine = Engine()
    engine.sends(heartbeat(), 10.0)
    assert engine.at(15.0).health().ready
    assert engine.at(15.1).health().status == "silent"
    engine.sends(heartbeat(), 16.0)
    assert engine.at(16.0).health().ready


def test_engine_that_is_silent_is_awaited_after_its_supervisor_has_killed_it() -> None:
    engine = Engine()
    engine.watch = EngineWatch(5.0, 60.0, engine.clock, hang_timeout=8.0)
    engine.sends(heartbeat(start_seconds=3.0), 10.0)
    engine.at(10.1).note_loss()
    assert engine.at(10.1).seconds_until_ready() == 4, "its connection was closed"
    engine.sends(heartbeat(start_seconds=3.0), 11.0)
    engine.at(16.5).note_loss()
    assert engine.at(16.5).seconds_until_ready() == 6
    assert engine.at(19.5).seconds_until_ready() == 3


def test_reset_timers_ignores_the_silence_of_a_delayed_listener() -> None:
    engine = Engine()
    engine.sends(heartbeat(), 10.0)
    engine.at(100.0).reset_timers()
    assert engine.at(104.0).health().ready


def test_health_without_a_step_while_requests_are_pending_is_hung() -> None:
    engine = Engine()
    for second in range(100):
        engine.sends(heartbeat(pending=2, steps=7), float(second))
    assert engine.at(99.0).health().status == "hung"
    assert numbers_in(engine.at(99.0).health().reason)[:2] == [99, 2]
    engine.sends(heartbeat(pending=2, steps=8), 100.0)
    assert engine.at(100.0).health().ready


def test_paused_engine_is_neither_ready_nor_hung() -> None:
    engine = Engine()
    for now in range(0, 200, 2):
        sent = heartbeat(pending=3, steps=7)
        sent.stats.paused = 1
        engine.sends(sent, float(now))
    health = engine.at(199.0).health()
    assert (health.ready, health.takes_requests, health.status) == (False, True, "paused")
    assert engine.watch.should_restart(8.0) == ""
    engine.sends(heartbeat(pending=3, steps=7), 200.0)
    assert engine.at(204.0).health().ready, "the time of the pause does not count as a step's"
    for now in range(205, 270, 2):
        engine.sends(heartbeat(pending=3, steps=7), float(now))
    assert engine.at(270.0).health().status == "hung"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"pause": PauseFacts("wait", True, False)}, "pausing"),
        ({"pause": PauseFacts("wait", False, False)}, "ready"),
        ({"pause": PauseFacts(None, False, False)}, "ready"),
        ({"weights": WeightFacts("0", "ready", is_sleep_due=True)}, "sleeping"),
        ({"weights": WeightFacts("0", "ready")}, "ready"),
    ],
)
def test_engine_that_refuses_requests_until_it_pauses_or_sleeps_is_not_ready(
    changes: dict[str, Any], status: str
) -> None:
    engine = Engine()
    for now in range(0, 70, 2):
        engine.sends(structs.replace(heartbeat(pending=3, steps=now), **changes), float(now))
    health = engine.at(69.0).health()
    assert (health.status, health.ready, health.takes_requests) == (status, status == "ready", True)
    for now in range(70, 140, 2):
        engine.sends(structs.replace(heartbeat(pending=3, steps=70), **changes), float(now))
    assert engine.at(139.0).health().status == "hung", "it still computes"


@pytest.mark.parametrize("changes", [1, 2])
def test_newest_word_on_a_pause_counts_by_whichever_socket_it_comes(changes: int) -> None:
    words = ("ready", "paused", "ready", "paused")
    engine = Engine()
    old, new, newer = (heartbeat(changes=number) for number in range(changes - 1, changes + 2))
    engine.sends(old, 10.0)
    assert engine.watch.health().status == words[changes - 1]
    engine.watch.note_pause(1, changes)
    assert engine.watch.health().status == words[changes]
    engine.sends(old, 15.0)
    assert engine.watch.health().status == words[changes], "it was sent before the answer"
    engine.sends(new, 15.1)
    engine.sends(newer, 15.2)
    assert engine.watch.health().status == words[changes + 1], "another frontend has changed it since"
    engine.watch.note_pause(1, changes)
    assert engine.watch.health().status == words[changes + 1], "an answer that is late"


def test_retry_after_of_a_pause_is_not_the_time_of_the_last_restart() -> None:
    engine = Engine()
    for epoch, start in ((1, 10.0), (2, 100.0)):
        engine.sends(heartbeat(Phase.LOADING, epoch=epoch, percent=0), start)
        engine.sends(heartbeat(epoch=epoch), start + 40.0)
    assert engine.watch.seconds_until_ready() == 60
    engine.sends(heartbeat(epoch=2, changes=1), 140.1)
    assert engine.watch.seconds_until_ready() == UNKNOWN_SECONDS


def test_pause_ends_with_the_life_of_the_engine() -> None:
    restarted, unheard = Engine(), Engine()
    restarted.sends(heartbeat(changes=3), 10.0)
    restarted.sends(heartbeat(epoch=2), 10.1)
    unheard.watch.note_pause(1, 1)
    unheard.sends(heartbeat(), 10.0)
    assert all(engine.watch.health().ready for engine in (restarted, unheard))


def test_answer_of_an_engine_that_was_replaced_says_nothing_about_its_successor() -> None:
    engine = Engine()
    engine.sends(heartbeat(epoch=2), 10.0)
    engine.watch.note_pause(1, 5)
    assert engine.watch.health().ready
    engine.sends(heartbeat(epoch=2), 10.1)
    assert engine.watch.health().ready


def test_pause_of_an_engine_that_does_not_count_its_changes_is_seen() -> None:
    engine = Engine()
    for paused, status in ((0, "ready"), (1, "paused"), (0, "ready")):
        sent = heartbeat()
        sent.stats.paused = paused
        engine.sends(sent, 10.0)
        engine.watch.note_pause(1, 0)  # the answer to the call before, or to a later one
        assert engine.watch.health().status == status


def test_idle_and_warming_engines_are_never_hung() -> None:
    idle, warming = Engine(), Engine()
    for second in range(200):
        idle.sends(heartbeat(), float(second))
        warming.sends(heartbeat(Phase.WARMING, pending=1), float(second))
    assert idle.at(199.0).health().ready
    assert warming.at(199.0).health().status == "loading"
    idle.sends(heartbeat(pending=1), 200.0)
    assert idle.at(200.0).health().ready


def test_a_new_epoch_counts_as_progress() -> None:
    engine = Engine()
    for second in range(70):
        engine.sends(heartbeat(pending=1, steps=3), float(second))
    engine.sends(heartbeat(pending=1, steps=3, epoch=2), 70.0)
    assert engine.at(70.0).health().ready


def test_should_restart_a_hung_engine() -> None:
    engine = Engine()
    for second in range(61):
        assert engine.at(float(second)).should_restart(8.0) == ""
        engine.sends(heartbeat(pending=2, steps=7), float(second))
    assert numbers_in(engine.at(61.0).should_restart(8.0))[:2] == [61, 2]


@pytest.mark.parametrize("hang_timeout", [2.0, 8.0])
def test_should_restart_an_engine_silent_for_the_hang_timeout_and_later_while_loading(hang_timeout: float) -> None:
    engine, loading = Engine(), Engine()
    engine.sends(heartbeat(), 10.0)
    loading.sends(heartbeat(Phase.LOADING), 10.0)
    assert engine.at(10.0 + hang_timeout).should_restart(hang_timeout) == ""
    assert "no heartbeat" in engine.at(10.1 + hang_timeout).should_restart(hang_timeout)
    assert loading.at(70.0).should_restart(hang_timeout) == ""
    assert "no heartbeat" in loading.at(70.1).should_restart(hang_timeout)


def test_should_not_restart_an_engine_that_loads_or_was_never_heard() -> None:
    engine, loading = Engine(), Engine()
    assert engine.at(1000.0).should_restart(8.0) == ""
    for second in range(1000):
        loading.sends(heartbeat(Phase.LOADING, percent=3), float(second))
    assert loading.at(999.0).should_restart(8.0) == ""


def test_should_not_restart_after_a_delay_of_the_listener() -> None:
    engine = Engine()
    engine.sends(heartbeat(pending=1), 10.0)
    engine.at(100.0).reset_timers()
    assert engine.at(101.0).should_restart(8.0) == ""


def test_forget_ignores_late_heartbeats_of_the_ended_life() -> None:
    engine = Engine()
    engine.sends(heartbeat(), 10.0)
    engine.at(10.0).forget()
    assert engine.at(11.0).health().status == "waiting"
    engine.sends(heartbeat(), 11.0)
    assert engine.watch.heartbeat is None
    assert engine.at(1000.0).should_restart(8.0) == ""
    engine.sends(heartbeat(epoch=2), 12.0)
    assert engine.at(12.0).health().ready
