"""A killed engine, and a model that is missing."""

import signal
from pathlib import Path

import openai
import pytest

from tests.support.serving import GUARD_SECONDS, Serving, until

PROMPT = "Tell me about os.path.join"
ENDLESS = {"ignore_eos": True}


@pytest.mark.slow
def test_a_killed_engine_ends_its_streams_and_is_restarted(tmp_path: Path) -> None:
    with (
        Serving(tmp_path / "log") as serving,
        openai.OpenAI(base_url=serving.url + "/v1", api_key="none", timeout=GUARD_SECONDS, max_retries=0) as client,
    ):
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


def test_a_missing_model_is_reported_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    serving = Serving(log, "--model", str(tmp_path / "nowhere"))
    with pytest.raises(AssertionError, match="exited with 2"), serving:
        pass
    assert "config.json" in log.read_text() or "tokenizer.json" in log.read_text()
