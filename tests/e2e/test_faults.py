"""Death and orderly stop of the processes of a server."""

import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.serving import GUARD_SECONDS, Serving, until

PROMPT = "Tell me about os.path.join"
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server for the tests of this file: the first kills its engine, the second stops it."""
    with Serving(tmp_path_factory.mktemp("faults") / "log", "--drain-timeout", "0.5") as running:
        yield running


def connect(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=serving.url + "/v1", api_key="none", timeout=GUARD_SECONDS, max_retries=0)


def test_a_killed_engine_ends_its_streams_and_is_restarted(serving: Serving) -> None:
    with connect(serving) as client:
        stream = client.completions.create(
            model="tandem-default", prompt=PROMPT, max_tokens=1900, stream=True, extra_body=ENDLESS
        )
        chunks = iter(stream)
        assert next(chunks).choices[0].finish_reason is None
        engine = serving.child("tandem.engine_core")
        engine.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine"):
            for _ in chunks:
                pass
        until(
            lambda: serving.get("/health/ready")[0] == 503 or serving.child("tandem.engine_core").pid != engine.pid,
            "503",
        )
        assert serving.get("/health/live")[0] == 200
        until(serving.ready, "the restarted engine")
        assert serving.child("tandem.engine_core").pid != engine.pid
        reply = client.completions.create(model="tandem-default", prompt=PROMPT, max_tokens=8)
        assert reply.choices[0].finish_reason in ("stop", "length")
        assert serving.engine_metric("tandem_engine_restarts_total") == 1


def test_sigterm_ends_open_streams_and_exits_with_0(serving: Serving) -> None:
    with connect(serving) as client:
        stream = client.completions.create(
            model="tandem-default", prompt=PROMPT, max_tokens=1900, stream=True, extra_body=ENDLESS
        )
        chunks = iter(stream)
        next(chunks)
        assert serving.process is not None
        children = [serving.child("tandem.frontend"), serving.child("tandem.engine_core")]
        serving.process.send_signal(signal.SIGTERM)
        ended = None
        try:
            for chunk in chunks:
                ended = chunk.choices[0].finish_reason
        except openai.APIError:
            ended = "error"
        assert ended in ("error", "length"), "an open stream ends in exactly one way, and never just stops"
        assert serving.process.wait(GUARD_SECONDS) == 0
        assert not [child for child in children if child.is_running()]


def test_a_missing_model_is_reported_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    serving = Serving(log, "--model", str(tmp_path / "nowhere"))
    with pytest.raises(AssertionError, match="exited with 2"), serving:
        pass
    assert "config.json" in log.read_text() or "tokenizer.json" in log.read_text()
