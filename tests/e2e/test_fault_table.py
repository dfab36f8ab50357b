"""Faults of a service of several frontends, in short; `benchmarks/bench_faults.py` has the figures.

All the while both ports are scraped: every scrape is answered with whole metrics, and no counter falls.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.fakes.scripted_engine import Script
from tests.support.scrape import value
from tests.support.scraper import Scraper
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, until
from tests.support.stopped_process import stop_process
from tests.support.stream_client import Stream, StreamClient, Summary, answer, completion, summary

FRONTENDS = 3
LONG = 2000
"""Tokens of a stream that outlives its test."""
WHOLE = 180
"""Tokens of an answer that takes 6 s, in which a machine has to see that all of them have rows."""
ANSWERS = "tandem_e2e_request_latency_seconds_count"
TOKENS = "tandem_frontend_generation_tokens_total"
CHATS = 'tandem_http_requests_total{route="/v1/chat/completions",status="200"}'
TIMES = ("--beat-timeout", "4", "--hang-timeout", "6")
"""More than the few seconds for which a busy machine may hold up a process."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServing]:
    """A server for all tests of this file. Each leaves it with every frontend and no sequence."""
    log = tmp_path_factory.mktemp("faults") / "log"
    flags = ("--frontends", str(FRONTENDS), "--drain-timeout", "20", "--send-timeout", "2", *TIMES)
    with ScriptedServing(log, *flags, script=Script(tokens_per_second=30.0)) as running:
        yield running


@pytest.fixture
def scraper(serving: ScriptedServing) -> Iterator[Scraper]:
    until(lambda: serving.num_serving() == FRONTENDS and serving.ready(), "all frontends")
    with Scraper(serving.port, serving.ops_port) as running:
        yield running


@pytest.fixture
def client(serving: ScriptedServing, scraper: Scraper) -> Iterator[StreamClient]:
    """A client of a service that is scraped as long as the client is there."""
    assert not scraper.problems
    with serving.clients() as streams:
        yield streams
    until(serving.rows_and_pages_are_free, "rows and pages of clients that have left")


def all_done(streams: Sequence[Stream], tokens: int) -> None:
    assert Summary.of(streams) == Summary(done=len(streams), error=0, cut=0, open=0, problems=0), summary(streams)
    assert {stream.num_tokens for stream in streams} == {tokens}


def whole_in_progress(serving: ScriptedServing, client: StreamClient, count: int, running: int) -> list[Stream]:
    """Ask for answers that are not streamed; return them once so many requests in all have a row.

    Where a machine has no time to see that before they have ended, ask again.
    """
    while True:
        whole = client.open(completion(WHOLE, stream=False), count)
        client.until(
            lambda whole=whole: (  # type: ignore[misc]
                serving.engine_metric("tandem_num_requests_running") == running or all(one.outcome for one in whole)
            ),
            "a row for every request",
        )
        if not any(one.outcome for one in whole):
            return whole
        client.until_ended(whole)


def test_killed_engine_costs_its_streams_and_no_request_without_output(
    serving: ScriptedServing, client: StreamClient
) -> None:
    streams = client.open(completion(LONG), 100)
    client.until_streaming(streams)
    whole = whole_in_progress(serving, client, 10, running=110)
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
    whole = whole_in_progress(serving, client, 10, running=30)
    stopped = stop_process(serving.engine.pid)
    client.until_ended(streams)
    assert Summary.of(streams).error == 20, summary(streams)
    client.until_ended(whole)
    all_done(whole, WHOLE)
    assert serving.engine.pid != stopped


def holder(serving: ScriptedServing, client: StreamClient, streams: list[Stream], tokens: int) -> psutil.Process:
    """Return one of the frontends that hold streams, to which others of as many tokens are added until it is not alone.

    While frontends are held up, another accepts in their place.
    """
    while True:
        holders = [
            frontend
            for frontend in serving.frontends()
            if any(c.laddr.port == serving.port and c.status == "ESTABLISHED" for c in frontend.net_connections("tcp"))
        ]
        if len(holders) > 1:
            return holders[0]
        streams += client.open(completion(tokens), 10)
        client.until_streaming(streams)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow, id="killed"), pytest.param(signal.SIGSTOP, id="stopped")],
)
def test_lost_frontend_costs_only_its_own_streams(
    serving: ScriptedServing, client: StreamClient, scraper: Scraper, fault: signal.Signals
) -> None:
    scraper.losing = {serving.port}
    streams = client.open(completion(LONG), 60)
    client.until_streaming(streams)
    lost = holder(serving, client, streams, LONG)
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
    assert 0 < found.cut < len(streams), summary(streams)
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
    left = holder(serving, client, long, 150)
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


class Counted:
    """What a port's counters say, beside what clients have got since."""

    def __init__(self, serving: ScriptedServing, client: StreamClient) -> None:
        """Begin where nothing is in progress, and all frontends have reported what was before."""
        self._serving = serving
        self._client = client
        self._base = self._read(serving.ops_port)

    def _read(self, port: int) -> tuple[float, float]:
        text = self._serving.metrics(port)
        return value(text, ANSWERS), value(text, TOKENS)

    def at(self, port: int) -> tuple[float, float]:
        """Return answers and tokens since the beginning."""
        answers, tokens = self._read(port)
        return answers - self._base[0], tokens - self._base[1]

    @property
    def num_done(self) -> int:
        """Answers that clients got in full."""
        return Summary.of(self._client.streams).done

    @property
    def num_tokens(self) -> int:
        """Tokens that clients got."""
        return sum(stream.num_tokens for stream in self._client.streams)

    def until_told(self, tokens: float) -> None:
        """Wait until the counters have all answers in full, and as many tokens."""
        self._client.until(
            lambda: (told := self.at(self._serving.ops_port))[0] == self.num_done and told[1] >= tokens,
            f"reports of {tokens} tokens",
        )


def let_all_report(serving: ScriptedServing, client: StreamClient) -> None:
    """Have every frontend answer requests of a route of their own, and wait until it has told of them."""
    chat = b'{"model": "tandem-default", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
    before = serving.engine_metric(CHATS)
    client.until_ended(client.open(chat, 40, "/v1/chat/completions"))
    client.until(lambda: serving.engine_metric(CHATS) == before + 40, "a report of each frontend")


def reported_streams(client: StreamClient, counted: Counted, lost: float) -> tuple[list[Stream], int]:
    """Open 20 streams and wait until as many tokens are told as clients have; return them and that number.

    lost: tokens that clients have and that are never told. Where the streams have ended by then, open others.
    """
    while True:
        streams = client.open(completion(WHOLE), 20)
        client.until_streaming(streams)
        before = counted.num_tokens
        counted.until_told(before - lost)
        if not any(stream.outcome for stream in streams):
            return streams, before
        client.until_ended(streams)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_counters_over_kills_of_frontends_are_what_clients_saw(
    serving: ScriptedServing, client: StreamClient, scraper: Scraper, kills: int
) -> None:
    """What a killed frontend had reported is not lost; what it counted after its last report may be."""
    scraper.losing = {serving.port}
    with serving.clients() as early:
        let_all_report(serving, early)
    counted = Counted(serving, client)
    generated = serving.fresh_engine_metric("tandem_generation_tokens_total")
    lost = allowed = 0.0
    for _ in range(kills):
        short = client.open(completion(10), 20)
        client.until_ended(short)
        streams, before = reported_streams(client, counted, lost)
        holder(serving, client, streams, WHOLE).kill()
        client.until(lambda streams=streams: any(s.outcome == "cut" for s in streams), "the end of its streams")  # type: ignore[misc]
        allowed += counted.num_tokens - before
        client.until_ended(streams)
        counted.until_told(0)  # survivors have reported, as their streams ended in full
        lost = counted.num_tokens - counted.at(serving.ops_port)[1]
        assert lost <= allowed, f"{lost} tokens are lost, clients got {allowed} since the last reports"
        until(lambda: serving.num_serving() == FRONTENDS, "the successor")
    answers, tokens = counted.at(serving.ops_port)
    assert answers == counted.num_done > kills * 20
    assert tokens <= serving.fresh_engine_metric("tandem_generation_tokens_total") - generated
    assert Summary.of(client.streams).cut >= kills
    assert counted.at(serving.port) == (answers, tokens)


@pytest.mark.slow
def test_service_that_ends_answers_scrapes_while_it_drains(tmp_path: Path) -> None:
    flags = ("--frontends", "2", "--drain-timeout", "60", "--shutdown-delay", "1")
    with ScriptedServing(tmp_path / "log", *flags, script=Script(tokens_per_second=30.0)) as ending:
        assert ending.process is not None
        with ending.clients() as client, Scraper(ending.port, ending.ops_port) as scraper:
            streams = client.open(completion(WHOLE), 10)
            client.until_streaming(streams)
            scraper.losing = {ending.port, ending.ops_port}
            ending.process.terminate()
            begun = {port: scraper.num_answered(port) for port in (ending.port, ending.ops_port)}
            client.until(lambda: scraper.num_answered(ending.port) > begun[ending.port], "a scrape in the delay")
            client.until_ended(streams)
            all_done(streams, WHOLE)
            assert scraper.num_answered(ending.ops_port) > begun[ending.ops_port], "scrapes while it drains"
            ending.process.wait(GUARD_SECONDS)
        for port in begun:
            statuses = [scrape.status for scrape in scraper.scrapes if scrape.port == port]
            assert statuses == sorted(statuses, reverse=True), f"an answer after none: {statuses}"
