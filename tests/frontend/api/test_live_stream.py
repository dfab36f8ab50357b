"""Streams from tokens to writes, in virtual time: what is merged, and what is never delayed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from tandem.frontend.api.completions.request import parse_completion
from tandem.frontend.api.live_stream import LiveStream
from tandem.frontend.api.write_ticks import WriteTicks
from tandem.frontend.engine.streams import TokenStream
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted, AdmittedPrompt, _sampling
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.generation import Generation
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.frontend.generation.test_generation import MODEL, Streams
from tests.support.virtual_loop import VirtualLoop

RAW = byte_level_tokenizer()
STEP = 0.001
INTERVAL = 0.0105


class Lines:
    """Formatter whose events are the texts of deltas."""

    keep_alive = b":"

    def batch(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        return b"".join([f"{piece.index}={piece.text}|".encode() for piece in pieces if piece.text])


class Paper:
    """Writer that records what is written, and when."""

    def __init__(self) -> None:
        self.is_paused = False
        self.written: list[tuple[float, str]] = []
        self.resume: Callable[[], None] | None = None

    def write(self, body: bytes) -> None:
        self.written.append((round(asyncio.get_running_loop().time(), 6), body.decode()))

    def set_resume(self, resume: Callable[[], None] | None) -> None:
        self.resume = resume


class Live:
    """A generation whose first output was written, and its stream."""

    def __init__(self, interval: float, keep_alive: float | None, fields: str) -> None:
        self.client: Any = Streams()
        options = parse_completion(b'{"model": "m", "prompt": [5]%b}' % fields.encode(), IgnoredFields()).options
        admitted = Admitted(options, MODEL, [AdmittedPrompt("", [5], b"\x05\0\0\0", 16)], _sampling(options, {}))
        self.metrics = FrontendMetrics(CollectorRegistry())
        clock = asyncio.get_running_loop().time
        self.generation = Generation(self.client, self.client, self.metrics, admitted, 0.0, clock)
        self.generation.start(10, 1000)
        self.paper = Paper()
        formatter: Any = Lines()
        self.live = LiveStream(self.generation, formatter, self.paper, WriteTicks(interval), keep_alive)

    @property
    def stream(self) -> TokenStream:
        stream: TokenStream = self.client.streams[0]
        return stream

    def put(self, text: str, choice: int = 0) -> None:
        self.client.streams[choice].put(RAW.encode(text).ids)

    async def say(self, *texts: str) -> None:
        """Give the stream a text every millisecond."""
        for text in texts:
            await asyncio.sleep(STEP)
            self.put(text)


def written(
    script: Callable[[Live], Awaitable[None]], interval: float = 0.0, keep_alive: float | None = None, fields: str = ""
) -> list[tuple[float, str]]:
    """Run a script against a stream to its end; return the writes with their times."""

    async def run() -> list[tuple[float, str]]:
        live = Live(interval, keep_alive, fields)
        running = asyncio.create_task(live.live.run())
        await asyncio.sleep(0)
        try:
            await script(live)
            await running
        finally:
            live.generation.close("error")
        assert live.paper.resume is None
        return live.paper.written

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


async def count_to_five_and_end(live: Live) -> None:
    await live.say("1", "2", "3", "4", "5")
    live.stream.end(Finished(0, FinishReason.LENGTH))


def test_without_an_interval_each_turn_is_a_write() -> None:
    assert written(count_to_five_and_end) == [(number * STEP, f"0={number}|") for number in range(1, 6)]


def test_tokens_of_an_interval_are_one_event_and_the_end_is_not_delayed() -> None:
    async def script(live: Live) -> None:
        await live.say(*"abcdefghijklmno")
        live.stream.end(Finished(0, FinishReason.LENGTH))

    assert written(script, INTERVAL) == [(0.0105, "0=abcdefghij|"), (0.015, "0=klmno|")]


def test_a_stream_slower_than_the_interval_is_not_delayed() -> None:
    async def script(live: Live) -> None:
        for text in "ab":
            await asyncio.sleep(3 * INTERVAL)
            live.put(text)
        await asyncio.sleep(3 * INTERVAL)
        live.stream.end(Finished(0, FinishReason.LENGTH))

    assert written(script, INTERVAL) == [(0.0315, "0=a|"), (0.063, "0=b|")]


def test_the_end_of_one_choice_is_not_delayed_by_another() -> None:
    async def script(live: Live) -> None:
        live.put("a", 0)
        live.put("b", 1)
        await asyncio.sleep(STEP)
        live.client.streams[1].end(Finished(1, FinishReason.LENGTH))
        await asyncio.sleep(STEP)
        live.stream.end(Finished(0, FinishReason.LENGTH))

    assert written(script, INTERVAL, fields=', "n": 2') == [(0.001, "0=a|1=b|")]


def test_a_stop_string_ends_a_stream_within_the_interval() -> None:
    async def script(live: Live) -> None:
        await live.say("1", "2", "stop", "3")
        assert live.client.aborted == [0], "aborted when its text came"

    assert written(script, INTERVAL, fields=', "stop": ["to"]') == [(0.003, "0=12s|")]


def test_a_stream_of_events_keeps_its_tokens_apart() -> None:
    async def script(live: Live) -> None:
        await live.say("a", "b")
        live.stream.end(Finished(0, FinishReason.LENGTH))

    fields = ', "stream": true, "stream_format": "events"'
    for stop in ("", ', "stop": ["x"]'):
        assert written(script, INTERVAL, fields=fields + stop) == [(0.002, "0=a|0=b|")]


def test_a_paused_writer_gets_all_in_one_write_when_it_resumes() -> None:
    async def script(live: Live) -> None:
        live.paper.is_paused = True
        await count_to_five_and_end(live)
        await asyncio.sleep(1)
        assert live.paper.written == []
        live.paper.is_paused = False
        assert live.paper.resume is not None
        live.paper.resume()

    for interval in (0.0, INTERVAL):
        assert written(script, interval) == [(1.005, "0=12345|")]


def test_a_silent_stream_gets_signs_of_life() -> None:
    async def script(live: Live) -> None:
        await asyncio.sleep(2.5)
        live.put("a")
        await asyncio.sleep(2.0)
        live.paper.is_paused = True
        await asyncio.sleep(2.0)
        live.paper.is_paused = False
        live.stream.end(Finished(0, FinishReason.LENGTH))

    for interval in (0.0, INTERVAL):
        assert written(script, interval, 1.0) == [(1.0, ":"), (2.0, ":"), (2.5, "0=a|"), (3.5, ":"), (4.5, ":")]


@pytest.mark.parametrize("interval", [0.0, INTERVAL])
def test_a_failure_is_raised_after_what_came_before_it(interval: float) -> None:
    papers: list[Paper] = []

    async def script(live: Live) -> None:
        papers.append(live.paper)
        await live.say("1", "2")
        live.stream.end(Failure(0, ErrorCode.ENGINE_FAILED, "broken"))

    with pytest.raises(ApiError, match="broken"):
        written(script, interval)
    assert "".join(text for _, text in papers[0].written).replace("|0=", "") == "0=12|"


def test_a_bug_in_the_formatter_ends_the_stream() -> None:
    async def script(live: Live) -> None:
        live.live._formatter = structs.replace(ChoiceDelta(0, "", [], None))  # type: ignore[assignment]
        live.put("a")

    with pytest.raises(AttributeError, match="batch"):
        written(script)


def test_merged_tokens_are_counted_each_and_their_gap_once() -> None:
    async def script(live: Live) -> None:
        metrics.append(live.metrics)
        await live.say("a", "b", "c")
        await asyncio.sleep(0.5)
        live.stream.put([60] * 10)
        live.stream.end(Finished(0, FinishReason.LENGTH))

    metrics: list[FrontendMetrics] = []
    written(script)
    values = {sample.name + str(sample.labels.get("le", "")): sample.value
              for family in metrics[0].registry.collect() for sample in family.samples}  # fmt: skip
    assert values["tandem_frontend_generation_tokens_total"] == 13
    assert values["tandem_time_to_first_token_seconds_count"] == 1
    gaps = {le: values[f"tandem_inter_token_latency_seconds_bucket{le}"] for le in ("0.0005", "0.0025", "0.3", "+Inf")}
    assert gaps == {"0.0005": 0, "0.0025": 2, "0.3": 2, "+Inf": 3}
    assert values["tandem_inter_token_latency_seconds_sum"] == pytest.approx(0.502)
    assert values["tandem_inter_token_latency_seconds_count"] == 3
