"""Counters of what became of each sequence."""

from tandem.protocol.commands import Abort
from tandem.protocol.errors import ErrorCode, FinishReason
from tests.support.recorded_engine import Bench


def test_stats_hold_the_times_and_sizes_of_sequences_that_have_run() -> None:
    bench = Bench(1, rows=1)
    bench.submit(1, 4)
    bench.submit(2, 2)
    bench.say(Abort([2]))  # while it waits: it has no times
    while not bench.stats.request_prompt_tokens.total:
        bench.engine.tick()
        bench.clock.advance(1.0)
    stats = bench.stats
    assert stats.requests_finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    for histogram, total in (
        (stats.request_prompt_tokens, 3), (stats.request_generation_tokens, 4), (stats.request_max_tokens, 4),
    ):  # fmt: skip
        assert (sum(histogram.counts), histogram.total) == (1, total)
    assert sum(stats.inference_time.counts) == sum(stats.prefill_time.counts) == sum(stats.decode_time.counts) == 1
    assert stats.prefill_time.total > 0
    assert stats.decode_time.total >= 3
    assert stats.inference_time.total == stats.prefill_time.total + stats.decode_time.total
    assert stats.iteration_tokens.total == 3 + 4 - 1
    assert stats.queued_prompt_tokens == 0


def test_a_sequence_that_a_stop_string_ended_counts_as_stopped_and_one_that_failed_as_an_error() -> None:
    bench = Bench(1)
    bench.submit(1, 30)
    bench.submit(2, 30)
    bench.engine.tick()
    assert bench.stats.queued_prompt_tokens == 6
    bench.say(Abort([1], FinishReason.STOP))
    bench.engine.tick()
    bench.engine.scheduler.fail_all(ErrorCode.ENGINE_FAILED, "broken")
    bench.finish()
    assert bench.stats.requests_finished == {"stop": 1, "length": 0, "abort": 0, "error": 1}
    assert bench.stats.requests_failed == {"engine_failed": 1}
