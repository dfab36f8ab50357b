"""Prometheus metrics of the ops port from a heartbeat."""

from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.metrics import EngineTotals, LifeCollector
from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.metrics.vllm_names import VLLM_NAMES
from tandem.protocol.events import Heartbeat, Phase
from tandem.protocol.stats import EngineStats, Histogram
from tests.fakes.clock import FakeClock
from tests.support.scrape import counters, value

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
    page_size=16,
)


def exposition(heartbeat: Heartbeat | None, age: float = 0.0, restarts: int = 0) -> list[str]:
    """Return the lines of `/metrics` for an engine whose only heartbeat is `age` seconds old."""
    clock, totals = FakeClock(), EngineTotals()
    watch = EngineWatch(5.0, 60.0, clock)
    if heartbeat is not None:
        watch.observe(heartbeat)
        totals.observe(heartbeat)
        clock.advance(age)
    life = LifeCollector(watch, lambda: {"exit": restarts, "hang": 0})
    return Exposition([life, totals], lambda: "").text().splitlines()


def test_metrics_before_the_first_heartbeat_report_only_its_absence() -> None:
    lines = exposition(None, restarts=3)
    assert "tandem_engine_up 0.0" in lines
    assert 'tandem_engine_restarts_total{reason="exit"} 3.0' in lines
    assert 'tandem_engine_restarts_total{reason="hang"} 0.0' in lines
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
        'tandem_cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0',
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


def test_adapters_with_requests_have_the_labels_of_vllm() -> None:
    """One series with lists of names, as the Gateway API's inference extension reads it."""
    stats = EngineStats(lora_requests={"a": 2, "b": 3, "c": 1, "d": 0}, lora_rows={"a": 2, "b": 1}, max_loras=4)
    lines = exposition(Heartbeat(1, Phase.READY, 100, "", 5, stats))
    (info,) = [line for line in lines if line.startswith("tandem_lora_requests_info{")]
    assert 'max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="b,c"' in info
    assert float(info.rpartition(" ")[2]) > 1e9
    assert 'tandem_lora_requests{adapter="b"} 3.0' in lines
    assert VLLM_NAMES["tandem_lora_requests_info"] == ("vllm:lora_requests_info",)


def test_stage_seconds_are_documented_as_wall_time() -> None:
    lines = exposition(Heartbeat(1, Phase.READY, 100, "", 5, STATS), age=2.0)
    (line,) = [line for line in lines if line.startswith("# HELP tandem_engine_stage_seconds")]
    assert "Wall time" in line and "collect" in line


def test_metrics_of_an_engine_without_pages_or_observations_are_zero() -> None:
    lines = exposition(Heartbeat(1, Phase.LOADING, 10, "", 0, EngineStats()), age=12.0)
    assert "tandem_engine_up 0.0" in lines
    assert "tandem_kv_cache_usage_perc 0.0" in lines
    assert 'tandem_engine_step_rows_bucket{le="+Inf"} 0.0' in lines


def test_everything_keeps_its_last_value_while_the_engine_is_away_and_no_counter_falls_when_it_is_back() -> None:
    totals = EngineTotals()
    whole = Exposition([totals], lambda: "")
    totals.observe(Heartbeat(1, Phase.READY, 100, "", 5, STATS))
    before = whole.text()
    assert whole.text() == before
    fresh = EngineStats(
        generation_tokens=2,
        running=1,
        requests_finished={"stop": 1},
        queue_time=Histogram([0.1, 1.0], [0, 1, 0], 0.5),
        step_rows=Histogram([1.0], [0, 0]),
    )
    totals.observe(Heartbeat(2, Phase.READY, 100, "", 1, fresh))
    totals.observe(Heartbeat(1, Phase.READY, 100, "", 5, STATS))  # one that was on its way
    after = whole.text()
    assert counters(before).keys() <= counters(after).keys()
    assert [series for series, number in counters(before).items() if counters(after)[series] < number] == []
    assert value(after, "tandem_generation_tokens_total") == 42
    assert value(after, 'tandem_request_success_total{finished_reason="stop"}') == 6
    assert value(after, 'tandem_request_queue_time_seconds_bucket{le="1.0"}') == 6
    assert value(after, "tandem_num_requests_running") == 1


def test_a_heartbeat_that_comes_after_the_end_of_its_engine_still_counts() -> None:
    totals = EngineTotals()
    totals.observe(Heartbeat(1, Phase.READY, 100, "", 0, EngineStats(generation_tokens=5)))
    totals.observe(Heartbeat(1, Phase.DRAINING, 100, "", 0, EngineStats(generation_tokens=7)))
    totals.observe(Heartbeat(2, Phase.READY, 100, "", 0, EngineStats(generation_tokens=1)))
    assert value(Exposition([totals], lambda: "").text(), "tandem_generation_tokens_total") == 8
