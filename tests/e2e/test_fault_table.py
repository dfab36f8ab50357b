"""Faults of a service of several frontends, in short; `benchmarks/bench_faults.py` has the figures."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest

from tests.fakes.scripted_engine import Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, until
from tests.support.stopped_process import stop_process
from tests.support.stream_client import Stream, StreamClient, Summary, answer, completion, summary

FRONTENDS = 3
LONG = 2000
"""Tokens of a stream that outlives its test."""
WHOLE = 180
"""Tokens of an answer that takes 6 s, in which a busy machine has to see that all of them have rows."""
TIMES = ("--beat-timeout", "3", "--hang-timeout", "5")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServing]:
    """A server for all tests of this file. Each leaves it with every frontend and no sequence."""
    log = tmp_path_factory.mktemp("faults") / "log"
    flags = ("--frontends", str(FRONTENDS), "--drain-timeout", "20", "--send-timeout", "2", *TIMES)
    with ScriptedServing(log, *flags, script=Script(tokens_per_second=30.0)) as running:
        yield running


@pytest.fixture
def client(serving: ScriptedServing) -> Iterator[StreamClient]:
    until(lambda: serving.num_serving() == FRONTENDS and serving.ready(), "all frontends")
    with serving.clients() as streams:
        yield streams
    until(serving.rows_and_pages_are_free, "rows and pages of clients that have left")


def all_done(streams: Sequence[Stream], tokens: int) -> None:
    assert Summary.of(streams) == Summary(done=len(streams), error=0, cut=0, open=0, problems=0), summary(streams)
    assert {stream.num_tokens for stream in streams} == {tokens}


def test_killed_engine_costs_its_streams_and_no_request_without_output(
    serving: ScriptedServing, client: StreamClient
) -> None:
    streams = client.open(completion(LONG), 100)
    client.until_streaming(streams)
    whole = client.open(completion(WHOLE, stream=False), 10)
    client.until(lambda: serving.engine_metric("tandem_num_requests_running") == 110, "a row for every request")
    engine = serving.engine
    engine.kill()
    client.until_ended(streams)
    assert Summary.of(streams) == Summary(done=0, error=100, cut=0, open=0, problems=0), summary(streams)
    assert all("engine" in stream.message for stream in streams)
    client.until_ended(whole)
    all_done(whole, WHOLE)
    assert serving.engine.pid != engine.pid


@pytest.mark.slow
def test_stopped_engine_is_replaced_and_costs_no_request_without_output(
    serving: ScriptedServing, client: StreamClient
) -> None:
    streams = client.open(completion(LONG), 20)
    client.until_streaming(streams)
    whole = client.open(completion(WHOLE, stream=False), 10)
    client.until(lambda: serving.engine_metric("tandem_num_requests_running") == 30, "a row for every request")
    stopped = stop_process(serving.engine.pid)
    client.until_ended(streams)
    assert Summary.of(streams).error == 20, summary(streams)
    client.until_ended(whole)
    all_done(whole, WHOLE)
    assert serving.engine.pid != stopped


def holder(serving: ScriptedServing) -> psutil.Process:
    """Return one of the frontends that hold connections of clients, of which there are several."""
    holders = [
        frontend
        for frontend in serving.frontends()
        if any(c.laddr.port == serving.port and c.status == "ESTABLISHED" for c in frontend.net_connections("tcp"))
    ]
    assert len(holders) > 1, "connections went to one frontend alone"
    return holders[0]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow, id="killed"), pytest.param(signal.SIGSTOP, id="stopped")],
)
def test_lost_frontend_costs_only_its_own_streams(
    serving: ScriptedServing, client: StreamClient, fault: signal.Signals
) -> None:
    streams = client.open(completion(LONG), 60)
    client.until_streaming(streams)
    lost = holder(serving)
    if fault is signal.SIGSTOP:
        stop_process(lost.pid)
    else:
        lost.kill()
    others = client.open(completion(10), 30)
    client.until_ended(others)
    all_done(others, 10)
    client.until(lambda: not lost.is_running(), "the end of the lost frontend")
    client.until(lambda: any(stream.outcome for stream in streams), "the end of its streams")
    client.until(lambda: serving.running() == sum(not s.outcome for s in streams), "rows of living clients alone")
    found = Summary.of(streams)
    assert 0 < found.cut < 60, summary(streams)
    assert (found.done, found.error) == (0, 0), summary(streams)
    living = [stream for stream in streams if not stream.outcome]
    reached = max(stream.num_tokens for stream in living) + 10
    client.until(lambda: min(stream.num_tokens for stream in living) > reached, "tokens of every other stream")
    assert not any(stream.problem for stream in streams), summary(streams)


def steady_load(client: StreamClient, ended: Callable[[], bool], what: str) -> list[Stream]:
    """Keep 20 streams of 10 tokens each open until something has happened; return all of them, ended."""
    loaded = client.open(completion(10), 20)
    deadline = time.monotonic() + GUARD_SECONDS
    checked = 0.0
    while True:
        client.poll(0.02)
        if time.monotonic() > checked + 0.2:
            checked = time.monotonic()
            if ended():
                break
            assert checked < deadline, f"waited in vain for {what}"
        loaded += client.open(completion(10), 20 - sum(not stream.outcome for stream in loaded[-200:]))
    client.until_ended(loaded)
    return loaded


def is_replaced(serving: ScriptedServing, left: psutil.Process) -> bool:
    return not left.is_running() and serving.num_serving() == FRONTENDS


def test_frontend_that_is_asked_to_end_loses_and_refuses_nothing(
    serving: ScriptedServing, client: StreamClient
) -> None:
    long = client.open(completion(150), 20)
    client.until_streaming(long)
    left = holder(serving)
    left.terminate()
    loaded = steady_load(client, lambda: is_replaced(serving, left), "the successor")
    all_done(loaded, 10)
    client.until_ended(long)
    all_done(long, 150)


@pytest.mark.slow
def test_rolling_restart_of_all_frontends_loses_and_refuses_nothing(
    serving: ScriptedServing, client: StreamClient
) -> None:
    for left in serving.frontends():
        left.terminate()
        all_done(steady_load(client, lambda left=left: is_replaced(serving, left), "the successor"), 10)  # type: ignore[misc]


def test_idle_never_reading_and_vanishing_clients_cost_the_others_nothing(
    serving: ScriptedServing, client: StreamClient
) -> None:
    """A short form of 3,000 idle connections, 200 readers that never read and 2,000 disconnects at once."""
    others = client.open(completion(150), 20)
    with serving.clients() as hostile:
        hostile.idle(300)
        hostile.open(completion(LONG), 20, reads=False, receive_buffer=4096)
        leaving = hostile.open(completion(LONG), 200)
        hostile.until_streaming(leaving)
        for stream in leaving:
            hostile.drop(stream)
        until(lambda: serving.running() <= 40, "rows of those that have left")
        for _ in range(8):
            assert answer(serving.address, "/health/live")[0] == 200
        client.until_ended(others)
        all_done(others, 150)
