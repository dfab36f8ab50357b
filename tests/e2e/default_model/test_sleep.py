"""Sleep and wake of a served model with real processes: memory, outputs, requests meanwhile, and a killed engine."""

import json
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.support.serving import GUARD_SECONDS, Serving, until

QUESTION = {"model": "tandem-default", "prompt": "What does textwrap.dedent do?", "temperature": 0, "ignore_eos": True}
TOKENS = 24


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("sleep") / "log"
    # A wake needs the memory of the whole pool, and other processes may take some meanwhile.
    with Serving(log, "--enable-weight-updates", "--sleep-reserve", "--kv-tokens", "8192") as running:
        yield running


@pytest.fixture(scope="module")
def first(serving: Serving) -> str:
    return text_of(complete(serving))


@pytest.fixture(autouse=True)
def awake(serving: Serving) -> Iterator[None]:
    yield
    assert call(serving, "wake_up").status_code == 200


def call(serving: Serving, path: str) -> httpx.Response:
    return httpx.post(f"{serving.url}/{path}", timeout=GUARD_SECONDS)


def complete(serving: Serving) -> httpx.Response:
    return httpx.post(f"{serving.url}/v1/completions", json={**QUESTION, "max_tokens": TOKENS}, timeout=GUARD_SECONDS)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def is_sleeping(serving: Serving) -> bool:
    asked: bool = httpx.get(f"{serving.url}/is_sleeping", timeout=GUARD_SECONDS).json()["is_sleeping"]
    return asked


def own_bytes(process: psutil.Process) -> int:
    """Return the memory that a process alone holds, also what was swapped out."""
    found = process.memory_full_info()
    return int(found.uss + found.swap)


@pytest.mark.parametrize("level", [1, 2])
def test_the_weights_leave_memory_and_come_back(serving: Serving, first: str, level: int) -> None:
    weights = int(re.findall(r"a sleep releases (\d+) bytes of weights", serving.log.read_text())[-1])
    assert weights > 10_000_000
    engine = serving.engine
    full = own_bytes(engine)
    assert call(serving, f"sleep?level={level}").status_code == 200
    empty = own_bytes(engine)
    assert full - empty > 0.8 * weights, f"{full} bytes before, {empty} after, {weights} of weights"
    assert is_sleeping(serving)
    assert call(serving, "wake_up").status_code == 200
    assert own_bytes(engine) - empty > 0.8 * weights
    assert not is_sleeping(serving)
    assert text_of(complete(serving)) == first


def test_requests_get_503_until_both_parts_are_awake(serving: Serving, first: str) -> None:
    call(serving, "sleep")
    for tag in ("kv_cache", "weights"):
        refused = complete(serving)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_sleeping")
        assert int(refused.headers["retry-after"]) >= 1
        # Between two states of sleep there is one of change, in which the frontend takes requests.
        until(lambda: json.loads(serving.get("/health/ready")[1]).get("status") == "sleeping", "a heartbeat of it")
        assert serving.fresh_engine_metric("tandem_engine_sleeping") == 1
        assert call(serving, f"wake_up?tags={tag}").status_code == 200
    assert text_of(complete(serving)) == first
    until(serving.ready, "a heartbeat without the sleep")
    assert serving.fresh_engine_metric("tandem_engine_sleeping") == 0


def test_dropped_weights_that_are_woken_alone_are_incomplete(serving: Serving, first: str) -> None:
    call(serving, "sleep?level=2")
    for tag in ("weights", "kv_cache"):
        assert call(serving, f"wake_up?tags={tag}").status_code == 200
    refused = complete(serving)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "weights_changed")
    assert call(serving, "wake_up").status_code == 200
    assert text_of(complete(serving)) == first


class Stream:
    """A completion that is streamed by a thread."""

    def __init__(self, serving: Serving, tokens: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._url, self._body = serving.url, {**QUESTION, "max_tokens": tokens, "stream": True}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: self.events, "the first event")

    def _run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=GUARD_SECONDS) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))

    def ended(self) -> tuple[str, list[str], list[str]]:
        """Return the text, the reasons of ends and the codes of errors."""
        self._thread.join(GUARD_SECONDS)
        assert not self._thread.is_alive()
        choices = [choice for event in self.events for choice in event.get("choices", [])]
        errors = [event["error"]["code"] for event in self.events if "error" in event]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        return "".join(choice["text"] for choice in choices), reasons, errors


def test_streams_end_once_in_every_mode(serving: Serving) -> None:
    whole = Stream(serving, 300).ended()
    assert whole[1:] == (["length"], [])

    def is_aborted() -> bool:
        """Sleep within a stream; return False if the stream ended before, which it may on a busy machine."""
        stream = Stream(serving, 1500)
        assert call(serving, "sleep").status_code == 200
        _, *ends = stream.ended()
        assert ends in ([[], ["engine_sleeping"]], [["length"], []])
        call(serving, "wake_up")
        return not ends[0]

    until(is_aborted, "a sleep within a stream")

    stream = Stream(serving, 300)
    assert call(serving, "sleep?mode=wait").status_code == 200
    assert stream.ended() == whole
    call(serving, "wake_up")

    stream = Stream(serving, 300)
    assert call(serving, "sleep?mode=keep").status_code == 200
    assert is_sleeping(serving)
    call(serving, "wake_up")
    assert stream.ended() == whole
    until(serving.rows_and_pages_are_free, "free rows and pages")


def test_an_engine_that_is_killed_asleep_starts_awake(serving: Serving, first: str) -> None:
    call(serving, "sleep?level=2")
    until(lambda: serving.get("/health/ready")[0] == 503, "a heartbeat with the sleep")
    serving.engine.send_signal(signal.SIGKILL)
    until(serving.ready, "the next engine")
    assert not is_sleeping(serving)
    assert text_of(complete(serving)) == first
