"""Rates of an engine, from the counters of its heartbeats."""

from tandem.frontend.engine.engine_load import EngineLoad
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock


def beat(epoch: int, ended: int, failed: int, refused: int, tokens: int) -> Heartbeat:
    stats = EngineStats(prompt_tokens=tokens)
    stats.requests_finished = {"stop": ended}
    stats.requests_failed = {"model_failed": failed, "overloaded": refused}
    return Heartbeat(epoch, Phase.READY, 100, "", 0, stats)


def test_what_ends_and_what_is_admitted_between_heartbeats_is_counted() -> None:
    clock = FakeClock()
    load = EngineLoad(clock)
    load.observe(beat(1, 1000, 10, 0, 50_000))  # of the time before this frontend listened
    clock.advance(1)
    assert (load.seconds_until_ended(30), load.seconds_until_prefilled(300)) == (1, 1)
    load.observe(beat(1, 1002, 11, 900, 50_030))
    clock.advance(1)
    assert (load.seconds_until_ended(30), load.seconds_until_prefilled(300)) == (10, 10)


def test_the_counters_of_a_new_engine_begin_anew() -> None:
    clock = FakeClock()
    load = EngineLoad(clock)
    load.observe(beat(1, 100, 0, 0, 100))
    load.observe(beat(2, 3, 0, 0, 3))
    assert load.seconds_until_ended(30) == 1
    load.observe(beat(2, 6, 0, 0, 6))
    clock.advance(1)
    assert (load.seconds_until_ended(30), load.seconds_until_prefilled(30)) == (10, 10)
