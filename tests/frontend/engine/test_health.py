"""The health on an engine from its beats, without a clock."""

from tandem.frontend.engine.health import EngineWatch
from tandem.protocol.events import EngineStats, Heartbeat, Phase


def beat(phase: Phase = Phase.READY, pending: int = 0, steps: int = 0, epoch: int = 1, percent: int = 100) -> Heartbeat:
    return Heartbeat(epoch, phase, percent, "", pending, EngineStats(steps_launched=steps, steps_committed=steps))


def watch() -> EngineWatch:
    return EngineWatch(beat_timeout=5.0, step_timeout=60.0)


def test_nothing_heard() -> None:
    assert watch().health(1000.0).status == "waiting"
    assert watch().silence(1000.0) == 0.0


def test_phases() -> None:
    for phase, status in (
        (Phase.STARTING, "loading"), (Phase.LOADING, "loading"), (Phase.WARMING, "loading"), (Phase.READY, "ready"),
        (Phase.DRAINING, "draining"), (Phase.FAILED, "failed"),
    ):  # fmt: skip
        judge = watch()
        judge.observe(beat(phase, percent=40), 10.0)
        health = judge.health(10.0)
        assert (health.status, health.ready) == (status, phase is Phase.READY)
        assert health.percent == (40 if status == "loading" else None)


def test_silence_begins_after_the_timeout_and_ends_with_a_beat() -> None:
    judge = watch()
    judge.observe(beat(), 10.0)
    assert judge.health(15.0).ready
    assert judge.health(15.1).status == "silent"
    judge.observe(beat(), 16.0)
    assert judge.health(16.0).ready


def test_a_listener_that_was_held_up_blames_nobody() -> None:
    judge = watch()
    judge.observe(beat(), 10.0)
    judge.reset_timers(100.0)
    assert judge.health(104.0).ready


def test_hung_is_no_step_while_work_is_pending() -> None:
    judge = watch()
    for second in range(100):
        judge.observe(beat(pending=2, steps=7), float(second))
    assert judge.health(99.0).status == "hung"
    assert "99 s while 2 requests" in judge.health(99.0).reason
    judge.observe(beat(pending=2, steps=8), 100.0)
    assert judge.health(100.0).ready


def test_idle_or_warming_engines_do_not_hang() -> None:
    idle, warming = watch(), watch()
    for second in range(200):
        idle.observe(beat(), float(second))
        warming.observe(beat(Phase.WARMING, pending=1), float(second))
    assert idle.health(199.0).ready
    assert warming.health(199.0).status == "loading"
    idle.observe(beat(pending=1), 200.0)
    assert idle.health(200.0).ready


def test_a_new_epoch_starts_afresh() -> None:
    judge = watch()
    for second in range(70):
        judge.observe(beat(pending=1, steps=3), float(second))
    judge.observe(beat(pending=1, steps=3, epoch=2), 70.0)
    assert judge.health(70.0).ready


def test_a_hung_engine_is_hopeless() -> None:
    judge = watch()
    for second in range(61):
        assert judge.should_restart(float(second)) == ""
        judge.observe(beat(pending=2, steps=7), float(second))
    assert "no step for 61 s while 2 requests" in judge.should_restart(61.0)


def test_silence_becomes_hopeless_after_three_timeouts_and_later_while_loading() -> None:
    judge, loading = watch(), watch()
    judge.observe(beat(), 10.0)
    loading.observe(beat(Phase.LOADING), 10.0)
    assert judge.health(25.0).status == "silent"
    assert judge.should_restart(25.0) == ""
    assert "no heartbeat" in judge.should_restart(25.1)
    assert loading.should_restart(70.0) == ""
    assert "no heartbeat" in loading.should_restart(70.1)


def test_what_moves_or_was_never_heard_is_left_alone() -> None:
    judge, loading = watch(), watch()
    assert judge.should_restart(1000.0) == ""
    for second in range(1000):
        loading.observe(beat(Phase.LOADING, percent=3), float(second))
    assert loading.should_restart(999.0) == ""


def test_a_listener_that_was_held_up_calls_nobody_hung() -> None:
    judge = watch()
    judge.observe(beat(pending=1), 10.0)
    judge.reset_timers(100.0)
    assert judge.should_restart(101.0) == ""


def test_after_its_end_late_beats_of_a_life_are_not_heard() -> None:
    judge = watch()
    judge.observe(beat(), 10.0)
    judge.forget()
    assert judge.health(11.0).status == "waiting"
    judge.observe(beat(), 11.0)
    assert judge.beat is None
    assert judge.should_restart(1000.0) == ""
    judge.observe(beat(epoch=2), 12.0)
    assert judge.health(12.0).ready
