"""What an engine did during a load, from two readings of its server's metrics."""

import socket
from functools import partial

import pytest

from benchmarks.measuring.engine_counters import (
    ENDED,
    MAX_WAIT_SECONDS,
    EngineReader,
    added,
    counters,
    fetch,
    figures,
    line,
)
from tandem.engine_core.stats import STAGES
from tests.fakes.clock import FakeClock
from tests.fakes.http_server import Answer, scripted_server
from tests.support.engine_metrics import metrics_after
from tests.support.refusals import numbers_in


def test_figures_are_of_the_steps_between_two_readings() -> None:
    before, after = counters(metrics_after(10)), counters(metrics_after(30))
    found = figures(added(after, before, -1))
    assert found["steps"] == 20
    assert found["stages_us"] == pytest.approx({stage: number for number, stage in enumerate(STAGES)}, rel=2e-3)
    assert (found["rows_a_step"], found["mask_rows_a_step"]) == (64, 64)
    assert found["mask_us_a_row"] == pytest.approx(5.0, rel=1e-3)
    assert found["gpu_idle_percent"] == pytest.approx(25.0)
    assert "drain 0, plan 1, launch 2, sample 3, collect 4, commit 5, send 6;" in line(found)
    assert numbers_in(line(found)) == [64, 0, 1, 2, 3, 4, 5, 6, 64, 5, 25]


def test_counters_of_several_rounds_are_added() -> None:
    one, two = counters(metrics_after(10)), counters(metrics_after(30))
    assert added(added({}, one), two) == pytest.approx(counters(metrics_after(40)), rel=1e-3, abs=2e-6)


def test_what_was_not_counted_has_no_figure() -> None:
    found = figures(counters(metrics_after(0)))
    assert set(found["stages_us"].values()) == {None}
    assert found["mask_us_a_row"] is None and found["gpu_idle_percent"] is None
    masks = line(found).partition("; ")[2]
    assert masks.split().count("-") == 3 and numbers_in(masks) == []


def test_metrics_of_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tandem_engine_stage_seconds_total\b.*--metrics\b"):
        counters("# TYPE up gauge\nup 1\n")


class TestReader:
    """Readings before and after a load."""

    def test_the_second_reading_waits_for_every_request_of_the_load(self) -> None:
        texts = [metrics_after(steps, ended) for steps, ended in ((5, 3), (5, 3), (20, 10), (25, 11))]
        clock = FakeClock()
        with scripted_server(*(Answer(200, one.encode()) for one in texts)) as server:
            reader = EngineReader(partial(fetch, f"{server.url}/metrics"), clock, clock.advance)
            before = reader.read()
            found = reader.since(before, requests=8)
            assert [path for path, _ in server.requests] == ["/metrics"] * 4
        assert (found["steps"], found[ENDED]) == (20, 8)

    def test_requests_that_another_server_got_are_not_waited_for(self) -> None:
        clock = FakeClock()
        began = clock()
        reader = EngineReader(lambda: metrics_after(5, 3), clock, clock.advance)
        with pytest.raises(ConnectionError, match=r"^5 s\b.* 8 requests\b.*--metrics\b.* 0\b"):
            reader.since(reader.read(), requests=8)
        assert clock() - began == pytest.approx(MAX_WAIT_SECONDS, abs=0.1)

    def test_an_address_without_metrics_is_told(self) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed.getsockname()[1]}/metrics"
            with pytest.raises(ConnectionError, match=f"--metrics {url}: .*refused"):
                fetch(url)
        with scripted_server(Answer(404)) as server, pytest.raises(ConnectionError, match="404"):
            fetch(server.url)
        with pytest.raises(ConnectionError, match="--metrics localhost: "):
            fetch("localhost")
