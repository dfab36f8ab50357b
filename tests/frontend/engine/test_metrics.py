"""Prometheus metrics of the ops port from a heartbeat."""

from prometheus_client import CollectorRegistry, generate_latest

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.metrics import EngineCollector
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats, Histogram
from tests.fakes.clock import FakeClock

STATS = EngineStats(
    running=3,
    waiting=2,
    pages_used=25,
    pages_total=100,
    steps_in_flight=2,
    steps_launched=11,
    steps_committed=9,
    oldest_wait=0.5,
    prompt_tokens=70,
    generation_tokens=40,
    zombie_rows=4,
    pages_cached=6,
    prefix_queries=70,
    prefix_hits=32,
    pages_evicted=8,
    preemptions=2,
    sessions=3,
    sessions_evicted=1,
    requests_finished={"stop": 5, "length": 6},
    requests_failed={"overloaded": 1},
    stage_seconds={"plan": 0.25},
    queue_time=Histogram([0.1, 1.0], [3, 2, 1], 4.5),
    step_rows=Histogram([1.0], [1, 1], 5.0),
)


def exposition(heartbeat: Heartbeat | None, age: float = 0.0, restarts: int = 0) -> list[str]:
    """Return the lines of `/metrics` for an engine whose only heartbeat is `age` seconds old."""
    clock = FakeClock()
    watch = EngineWatch(5.0, 60.0, clock)
    if heartbeat is not None:
        watch.observe(heartbeat)
        clock.advance(age)
    registry = CollectorRegistry()
    registry.register(EngineCollector(watch, lambda: restarts))
    return generate_latest(registry).decode().splitlines()


def test_metrics_before_the_first_heartbeat_report_only_its_absence() -> None:
    lines = exposition(None, restarts=3)
    assert "tandem_engine_up 0.0" in lines
    assert "tandem_engine_restarts_total 3.0" in lines
    assert not any(line.startswith("tandem_num_requests") for line in lines)


def test_metrics_report_every_number_of_the_engine() -> None:
    lines = exposition(Heartbeat(1, Phase.READY, 100, "", 5, STATS), age=2.0)
    for line in (
        "tandem_engine_up 1.0",
        'tandem_engine_phase{phase="ready"} 1.0',
        'tandem_engine_phase{phase="failed"} 0.0',
        "tandem_engine_seconds_since_last_beat 2.0",
        "tandem_num_requests_running 3.0",
        "tandem_num_requests_waiting 2.0",
        "tandem_kv_cache_usage_perc 0.25",
        "tandem_steps_in_flight 2.0",
        "tandem_oldest_wait_seconds 0.5",
        "tandem_prompt_tokens_total 70.0",
        "tandem_generation_tokens_total 40.0",
        "tandem_engine_steps_launched_total 11.0",
        "tandem_engine_steps_committed_total 9.0",
        "tandem_zombie_rows_total 4.0",
        "tandem_kv_cache_cached_pages 6.0",
        "tandem_prefix_cache_queries_total 70.0",
        "tandem_prefix_cache_hits_total 32.0",
        "tandem_kv_cache_evicted_pages_total 8.0",
        "tandem_num_preemptions_total 2.0",
        "tandem_num_sessions 3.0",
        "tandem_sessions_evicted_total 1.0",
        'tandem_request_success_total{finished_reason="stop"} 5.0',
        'tandem_request_failed_total{code="overloaded"} 1.0',
        'tandem_engine_stage_seconds_total{stage="plan"} 0.25',
        'tandem_request_queue_time_seconds_bucket{le="0.1"} 3.0',
        'tandem_request_queue_time_seconds_bucket{le="1.0"} 5.0',
        'tandem_request_queue_time_seconds_bucket{le="+Inf"} 6.0',
        "tandem_request_queue_time_seconds_sum 4.5",
        'tandem_engine_step_rows_bucket{le="+Inf"} 2.0',
    ):
        assert line in lines, line


def test_stage_seconds_are_documented_as_wall_time() -> None:
    lines = exposition(Heartbeat(1, Phase.READY, 100, "", 5, STATS), age=2.0)
    (line,) = [line for line in lines if line.startswith("# HELP tandem_engine_stage_seconds")]
    assert "Wall time" in line
    assert "collect is the wait for the device" in line


def test_metrics_of_an_engine_without_pages_or_observations_are_zero() -> None:
    lines = exposition(Heartbeat(1, Phase.LOADING, 10, "", 0, EngineStats()), age=12.0)
    assert "tandem_engine_up 0.0" in lines
    assert "tandem_kv_cache_usage_perc 0.0" in lines
    assert 'tandem_engine_step_rows_bucket{le="+Inf"} 0.0' in lines
