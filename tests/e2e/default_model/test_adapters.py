"""Adapters over HTTP, in front of a real engine: as models of every API, loaded at run time, and after a restart."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.frontend.cli.main import main
from tests.support.lora_folder import write_adapter
from tests.support.serving import GUARD_SECONDS, Serving, until
from tests.support.stopped_process import stop_process

BASE, PROMPT = "tandem-default", "What does textwrap.dedent do?"
MODEL = Path(__file__).parents[3] / "engine_core" / "default_model"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two adapters, which change every answer."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        write_adapter(folder / name, MODEL, rank=4 + 4 * seed, seed=seed, size=0.6)
    return folder


@pytest.fixture(scope="module")
def serving(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    flags = ("--enable-lora", "--lora-modules", f"first={root / 'first'}", "--lora-root", str(root))
    with Serving(tmp_path_factory.mktemp("serving") / "log", *flags, "--frontends", "2", "--threads", "1") as found:
        yield found


def complete(serving: Serving, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    status, answer = serving.post("/v1/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["code"]


def call(serving: Serving, path: str, **body: Any) -> int:
    """Post a body; return the status of the answer, which is a text."""
    return httpx.post(serving.url + path, json=body, timeout=GUARD_SECONDS).status_code


def load(serving: Serving, name: str, path: str, **fields: Any) -> int:
    return call(serving, "/v1/load_lora_adapter", lora_name=name, lora_path=path, **fields)


def unload(serving: Serving, name: str) -> int:
    return call(serving, "/v1/unload_lora_adapter", lora_name=name)


def test_model_chooses_an_adapter_in_every_api(serving: Serving) -> None:
    calls: dict[str, tuple[dict[str, Any], Any]] = {
        "/v1/completions": ({"prompt": PROMPT, "max_tokens": 8}, lambda a: a["choices"][0]["text"]),
        "/v1/chat/completions": (
            {"messages": MESSAGES, "max_tokens": 8},
            lambda a: a["choices"][0]["message"]["content"],
        ),
        "/v1/responses": (
            {"input": PROMPT, "max_output_tokens": 16},
            lambda a: a["output"][0]["content"][0]["text"],
        ),
        "/v1/messages": ({"messages": MESSAGES, "max_tokens": 8}, lambda a: a["content"][0]["text"]),
    }
    for path, (body, text) in calls.items():
        found = {}
        for model in (BASE, "first"):
            status, answer = serving.post(path, {"model": model, "temperature": 0, **body})
            assert status == 200 and answer["model"] == model, (path, answer)
            found[model] = text(answer)
        assert found[BASE] != found["first"], path


def test_a_grammar_and_an_adapter_go_together(serving: Serving) -> None:
    body = {
        "model": "first",
        "messages": MESSAGES,
        "max_tokens": 64,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}},
    }
    status, answer = serving.post("/v1/chat/completions", body)
    assert status == 200 and json.loads(answer["choices"][0]["message"]["content"]) in ("yes", "no")


def test_models_lists_adapters_with_their_parent(serving: Serving, root: Path) -> None:
    cards = {card["id"]: card for card in json.loads(serving.get("/v1/models")[1])["data"]}
    assert cards["first"]["parent"] == BASE and cards["first"]["root"] == str(root / "first")
    assert "parent" not in cards[BASE]
    assert json.loads(serving.get("/v1/models/first")[1]) == cards["first"]


def test_an_adapter_is_loaded_replaced_and_unloaded_while_the_server_runs(serving: Serving) -> None:
    assert complete(serving, "second") == (404, "model_not_found")
    assert load(serving, "second", "second") == 200
    # Each connection may reach the other frontend, which knows the adapter too.
    answers = {complete(serving, "second") for _ in range(8)}
    assert len(answers) == 1 and answers.pop()[0] == 200
    assert load(serving, "second", "second") == 400
    assert load(serving, "second", "first", load_inplace=True) == 200
    assert complete(serving, "second") == complete(serving, "first")
    assert unload(serving, "second") == 200
    assert {complete(serving, "second")[0] for _ in range(4)} == {404}
    assert unload(serving, "second") == 404


@pytest.mark.parametrize(
    ("name", "path", "status"), [(BASE, "first", 400), ("x", "..", 400), ("x", "/", 400), ("x", "nothing", 404)]
)
def test_names_and_paths_that_no_adapter_may_have(name: str, path: str, status: int, serving: Serving) -> None:
    assert load(serving, name, path) == status


def test_several_choices_have_the_adapter_and_an_unload_follows_them(serving: Serving) -> None:
    """sglang#36894: an unload waits for ever after a request with n choices."""
    assert load(serving, "second", "second") == 200
    body = {"model": "second", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "n": 3}
    status, answer = serving.post("/v1/completions", body)
    assert status == 200
    assert {choice["text"] for choice in answer["choices"]} == {complete(serving, "second")[1]}
    assert unload(serving, "second") == 200


def test_requests_of_a_batch_file_choose_adapters(serving: Serving, tmp_path: Path) -> None:
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    models = (BASE, "first", "missing")
    bodies = [{"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0} for name in models]
    fields = {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps({"custom_id": body["model"], "body": body} | fields) for body in bodies]
    asked.write_text("\n".join(lines))
    assert main(["run-batch", "--url", serving.url, str(asked), str(answered)]) == 1
    found = {line["custom_id"]: line["response"] for line in map(json.loads, answered.read_text().splitlines())}
    assert found["missing"]["status_code"] == 404
    for name in (BASE, "first"):
        assert found[name]["body"]["choices"][0]["text"] == complete(serving, name)[1]


def test_an_engine_that_was_killed_comes_back_with_its_adapters(serving: Serving) -> None:
    """Killed while it loads another one: that is there afterwards only if its load was answered so."""
    assert load(serving, "second", "second") == 200
    expected = complete(serving, "second")
    assert expected[0] == 200
    engine, connects = serving.engine, serving.num_connects
    with ThreadPoolExecutor(1) as pool:
        stop_process(engine.pid)
        loading = pool.submit(load, serving, "third", "second")
        engine.kill()
        status = loading.result()
    until(lambda: serving.num_connects == connects + serving.num_frontends, "the engine after it, for both frontends")
    assert complete(serving, "second") == expected
    assert complete(serving, "first")[0] == 200
    # 200 if the frontend took so long to send the call that another engine was there.
    assert (status, complete(serving, "third")[0]) in ((503, 404), (200, 200))
    assert load(serving, "third", "second", load_inplace=True) == 200 and complete(serving, "third") == expected
