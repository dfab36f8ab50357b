"""Sampling defaults of generation_config.json: which are read, and what requests make of them."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tandem.frontend.generation.sampling_defaults import CONFIG_NAME, load_sampling_defaults
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import write_tokenizer
from tests.frontend.conftest import RunningServer, get, post
from tests.support.shared_frontend import SharedFrontend, shared_fixtures

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "max_length": 9}


def write(folder: Path, config: Any) -> Path:
    (folder / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0.7, "repetition_penalty": 1.05, "min_p": 0.1}, {"temperature": 0.7, "min_p": 0.1,
                                                                         "repetition_penalty": 1.05}),
        ({"temperature": 1.0, "top_p": 1, "top_k": 0, "repetition_penalty": 1.0}, {}),
        ({"top_k": -1, "temperature": None, "eos_token_id": 2}, {}),
        ({"top_k": 50.0}, {"top_k": 50}),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_file(tmp_path: Path, config: Any, expected: dict[str, float]) -> None:
    found = load_sampling_defaults(write(tmp_path, config))
    assert found == expected
    assert all(isinstance(value, int if name == "top_k" else float) for name, value in found.items())


def test_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"temperature": 7, "top_k": 3}, r"temperature is 7\b.*\bnumber, 0 to 2\b"),
        ({"top_p": 0, "top_k": 3}, r"top_p is 0\b.*\bnumber, .*\b1\b"),
        ({"min_p": "0.1", "top_k": 3}, r"min_p is '0\.1'.*\bnumber\b"),
        ({"temperature": True, "top_k": 3}, r"temperature is True\b.*\bnumber\b"),
        ({"top_p": float("nan"), "top_k": 3}, "JSON"),
        ("[]", "`array`"),
        ("{", "truncated"),
    ],
)
def test_values_that_no_request_could_have_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        found = load_sampling_defaults(write(tmp_path, config))
    assert re.search(reason, caplog.text)
    assert found == ({"top_k": 3} if "number" in reason else {})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that recommends values."""
    folder = write(tmp_path_factory.mktemp("model"), QWEN3)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


shared, engine, server = shared_fixtures()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_requests_have_the_defaults_of_what_they_leave_out(
    server: RunningServer, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.tokens_per_step = 100  # of answers as long as the context
    model = {"model": "fake-model"}
    first = post(server.url + path, json=model | body)
    post(server.url + path, json=model | body | {"temperature": 1.0, "top_p": None})
    assert [(each.sampling.temperature, each.sampling.top_p, each.sampling.top_k) for each in engine.submits] == [
        (0.6, 0.95, 20), (1.0, 0.95, 20),
    ]  # fmt: skip
    if path == "/v1/responses":
        assert (first.json()["temperature"], first.json()["top_p"]) == (0.6, 0.95)


def test_models_route_states_the_defaults(server: RunningServer) -> None:
    (card,) = get(server.url + "/v1/models").json()["data"]
    assert card["default_sampling_params"] == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert get(server.url + "/v1/models/fake-model").json() == card


def test_defaults_can_be_turned_off(shared: SharedFrontend, engine: FakeEngine) -> None:
    running = RunningServer(structs.replace(shared.config, generation_config="off")).start().ready()
    post(running.url + "/v1/completions", json={"model": "fake-model", "prompt": "a"})
    assert (engine.submits[0].sampling.temperature, engine.submits[0].sampling.top_k) == (1.0, 0)
    running.stop()


def test_a_file_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_bytes(b'\xef\xbb\xbf{"top_k": 7}')
    assert load_sampling_defaults(tmp_path) == {"top_k": 7}
