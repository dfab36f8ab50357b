"""Counters: histograms, outcomes and the time of the loop's stages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.stats import (
    QUEUE_SECONDS,
    STAGES,
    STEP_ROWS,
    STEP_TOKENS,
    TOKENS,
    StageClock,
    count_outcome,
    count_verified,
    new_stats,
)
from tandem.protocol.codec import decode_event, encode
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, Heartbeat, Phase
from tandem.protocol.stats import Histogram
from tests.fakes.clock import FakeClock


@pytest.mark.parametrize(("value", "place"), [(0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (3.9, 2), (4.1, 3), (9e9, 3)])
def test_observation_counts_under_the_first_bound_that_holds_it(value: float, place: int) -> None:
    histogram = Histogram([1.0, 2.0, 4.0], [0] * 4)
    histogram.observe(value)
    assert histogram.counts == [int(index == place) for index in range(4)]
    assert histogram.total == value


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), max_size=30))
def test_histogram_loses_no_observation(values: list[float]) -> None:
    histogram = Histogram(QUEUE_SECONDS, [0] * (len(QUEUE_SECONDS) + 1))
    for value in values:
        histogram.observe(value)
    assert sum(histogram.counts) == len(values)
    assert histogram.total == pytest.approx(sum(values))
    for index, bound in enumerate(QUEUE_SECONDS):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)


def test_new_stats_have_every_label() -> None:
    stats = new_stats()
    assert set(stats.requests_finished) == {reason.value for reason in FinishReason} | {"error"}
    assert set(stats.stage_seconds) == set(STAGES)
    assert len(stats.queue_time.counts) == len(QUEUE_SECONDS) + 1
    assert len(stats.step_rows.counts) == len(STEP_ROWS) + 1
    assert new_stats().stage_seconds is not stats.stage_seconds


def test_bucket_bounds_increase() -> None:
    for bounds in (QUEUE_SECONDS, STEP_ROWS, TOKENS, STEP_TOKENS):
        assert bounds == sorted(set(bounds))


def test_outcomes_are_counted_by_reason_and_code() -> None:
    stats = new_stats()
    for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.ABORT):
        count_outcome(stats, Finished(1, reason))
    for code in (ErrorCode.OVERLOADED, ErrorCode.OVERLOADED, ErrorCode.INVALID_VALUE):
        count_outcome(stats, Failure(1, code, "x"))
    assert stats.requests_finished == {"stop": 2, "length": 0, "abort": 1, "error": 0}
    assert stats.requests_failed == {"overloaded": 2, "invalid_value": 1}
    beat = Heartbeat(1, Phase.READY, 100, "", 0, stats)
    assert decode_event(encode(beat)) == beat, "the keys are plain text on the wire"


def test_stages_share_the_time_between_two_marks() -> None:
    clock = FakeClock()
    stages = StageClock(dict.fromkeys(STAGES, 0.0), clock)
    assert stages.start() == clock.now
    clock.advance(1)
    assert stages.mark("drain") == clock.now
    clock.advance(2)
    stages.mark("plan")
    stages.mark("launch")
    clock.advance(4)
    stages.mark("plan")
    assert {name: value for name, value in stages.seconds.items() if value} == {"drain": 1.0, "plan": 6.0}
    clock.advance(100)
    stages.start()
    clock.advance(1)
    stages.mark("drain")
    assert stages.seconds["drain"] == 2.0, "sleep between two turns is nobody's"


def test_verified_drafts_are_counted_as_vllm_counts_them() -> None:
    """As in its `SpecDecodingStats.observe_draft`: per row and step; a right draft at its index in the draft."""
    stats = new_stats()
    count_verified(stats, {(3, 2): 1, (1, 0): 1, (0, 0): 4})
    count_verified(stats, {(7, 7): 1})
    count_verified(stats, {})
    assert stats.spec_decode_num_drafts == 3
    assert stats.spec_decode_num_draft_tokens == 11
    assert stats.spec_decode_num_accepted_tokens == 9
    assert stats.spec_decode_num_accepted_tokens_per_pos == {"0": 2, "1": 2, **{str(i): 1 for i in range(2, 7)}}
