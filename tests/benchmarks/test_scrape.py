"""Readings of metrics, and what happened between two of them."""

import pytest

from benchmarks.measuring.scrape import Scrape, histogram_quantiles, histogram_summary

INF = float("inf")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([(0.1, 0), (1.0, 0), (INF, 0)], {}),
        ([], {}),
        ([(0.1, 10), (1.0, 10), (INF, 10)], {"p50": 0.05, "p90": 0.09}),
        ([(0.1, 5), (1.0, 10), (INF, 10)], {"p50": 0.1, "p90": 0.82}),
        ([(0.1, 0), (1.0, 0), (INF, 10)], {"p50": 1.0, "p90": 1.0}),
    ],
)
def test_histogram_quantiles_interpolate_within_buckets(
    counts: list[tuple[float, float]], expected: dict[str, float]
) -> None:
    before = [(bound, 7.0 * (index + 1)) for index, (bound, _) in enumerate(counts)]
    after = [(bound, earlier + count) for (bound, count), (_, earlier) in zip(counts, before, strict=True)]
    assert histogram_quantiles(before, after, (50, 90)) == pytest.approx(expected)


def test_histogram_summary_uses_the_difference_of_two_readings() -> None:
    text = """# TYPE wait histogram
wait_bucket{{le="1.0"}} {0}
wait_bucket{{le="+Inf"}} {0}
wait_count {0}
wait_sum {1}
"""
    before, after = Scrape(text.format(2, 0.5)), Scrape(text.format(6, 2.5))
    assert histogram_summary(before, after, "wait", (50,)) == {"mean": 0.5, "p50": 0.5}
    assert histogram_summary(after, after, "wait", (50,)) == {}
    assert after.value("wait_sum") == 2.5 and after.value("other") == 0.0


def test_series_are_told_apart_by_a_label() -> None:
    reading = Scrape('# TYPE time counter\ntime_total{stage="plan"} 2\ntime_total{stage="send"} 0.5\n')
    assert reading.by_label("time_total", "stage") == {"plan": 2.0, "send": 0.5}
    assert reading.by_label("other", "stage") == {}
