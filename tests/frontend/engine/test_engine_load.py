"""Load of an engine by its heartbeats, and when the requests that it refuses are to return."""

import pytest

from tandem.frontend.engine.engine_load import EngineLoad
from tandem.protocol.events import Heartbeat, Limits, Phase
from tandem.protocol.stats import EngineStats
from tests.fakes.clock import FakeClock

LIMITS = Limits(20, 4096, 16, 512, max_waiting=80, max_concurrent=100, max_queued_tokens=6000)


def beat(
    ended: int = 0, tokens: int = 0, epoch: int = 1, failed: int = 0, pending: int = 100, **gauges: int
) -> Heartbeat:
    stats = EngineStats(prompt_tokens=tokens, **gauges)
    stats.requests_finished = {"stop": ended, "error": failed}
    stats.requests_failed = {"model_failed": failed, "overloaded": 900 * ended, "rate_limit_exceeded": 900 * ended}
    return Heartbeat(epoch, Phase.READY, 100, "", pending, stats)


def load_of(clock: FakeClock) -> EngineLoad:
    return EngineLoad(clock, lambda: 0.0)


def test_without_an_engine_the_time_is_a_second() -> None:
    assert load_of(FakeClock()).retry_after(1, 10, LIMITS) == 1


def test_what_ends_and_what_is_admitted_while_others_wait_is_counted() -> None:
    clock = FakeClock()
    load = load_of(clock)
    for second in range(200):
        load.observe(
            beat(1000 + 2 * second, 50_000 + 200 * second, failed=second, waiting=5, queued_prompt_tokens=9), LIMITS
        )
        clock.advance(1)
    # Three sequences end in a second, and 200 tokens are admitted; a tenth of the weight is the assumed 1 and 100.
    assert 10 <= load.retry_after_end(30, 1, LIMITS) <= 11
    assert 10 <= load.retry_after_prefill(2000, 1, LIMITS) <= 11


def test_the_counters_of_a_new_engine_begin_anew() -> None:
    clock = FakeClock()
    load = load_of(clock)
    load.observe(beat(100_000, 10**9), LIMITS)
    clock.advance(1)
    load.observe(beat(3, 3, epoch=2), LIMITS)
    assert load.retry_after_end(30, 1, LIMITS) >= 30


@pytest.mark.parametrize(
    ("pending", "gauges", "sequences", "tokens", "seconds"),
    [
        (100, {}, 8, 10, 8),  # beyond --max-concurrent by 8, of which one ends in a second
        (99, {"waiting": 80}, 8, 10, 8),  # beyond --max-waiting
        (3, {"queued_prompt_tokens": 5500}, 8, 1000, 5),  # beyond --max-queued-tokens by 500, of 100 in a second
        (3, {"queued_prompt_tokens": 200}, 1, 6000, 2),  # any prompt is taken while no other waits
        (3, {}, 8, 10, 1),  # a heartbeat of before the requests that the engine has
    ],
)
def test_time_of_a_request_that_the_engine_refused_follows_the_limit_that_it_exceeds(
    pending: int, gauges: dict[str, int], sequences: int, tokens: int, seconds: int
) -> None:
    load = load_of(FakeClock())
    load.observe(beat(pending=pending, **gauges), LIMITS)
    assert load.retry_after(sequences, tokens, LIMITS) == seconds


def test_frontends_share_what_ends() -> None:
    load = load_of(FakeClock())
    load.observe(beat(frontends=3), LIMITS)
    assert [load.retry_after_end(1, 1, LIMITS) for _ in range(3)] == [1, 4, 7]
