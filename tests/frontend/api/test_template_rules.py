"""Conversations that real clients send, with templates that take only some, on every route that renders them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tandem.frontend.chat.chat_template import TEMPLATES
from tandem.frontend.cli.main import main
from tandem.frontend.config import FrontendConfig
from tandem.protocol.codec import unpack_ids
from tests.fakes.tokenizer import BEGIN, END
from tests.frontend.conftest import post
from tests.support.published_templates import PUBLISHED
from tests.support.reasoning_model import RAW, write_reasoning_model
from tests.support.shared_frontend import SharedFrontend, shared_frontend

NAMES = ("chatml", "phi3", "olmo2", "qwen3", "qwen3_coder", "qwen3_5", "mistral", "gemma2", "llama3", "deepseek")
SOURCES = {name: PUBLISHED[name]["default"] for name in NAMES} | {"own": (TEMPLATES / "mistral.jinja").read_text()}
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "inn"}'}}
CLAUDE_TOOL = {"name": "look", "input_schema": PARAMETERS}
CLAUDE_CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "inn"}}
CLAUDE_RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "inn"}'}
RESULT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "found"}
SAID = {"role": "user", "content": "question"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "found"}

REQUESTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "null content with calls": (
        "chat/completions",
        {"messages": [SAID, {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}, RESULT]},
        ["question", "look", "inn", "found"],
    ),
    "no content with calls and tools": (
        "chat/completions",
        {"messages": [SAID, {"role": "assistant", "tool_calls": [CHAT_CALL]}, RESULT], "tools": [CHAT_TOOL]},
        ["question", "look", "inn", "found"],
    ),
    "null content with reasoning": (
        "chat/completions",
        {"messages": [SAID, {"role": "assistant", "content": None, "reasoning_content": "hm"}, SAID]},
        ["question"],
    ),
    "system and developer": (
        "chat/completions",
        {
            "messages": [
                {"role": "system", "content": "rule"},
                {"role": "developer", "content": "advice"},
                SAID,
                {"role": "assistant", "content": "answer"},
                {"role": "system", "content": "reminder"},
                {"role": "user", "content": "more"},
            ]
        },
        ["rule", "advice", "question", "answer", "reminder", "more"],
    ),
    "a tool use alone": (
        "messages",
        {
            "system": "rule",
            "messages": [
                SAID,
                {"role": "assistant", "content": [CLAUDE_CALL]},
                {"role": "user", "content": [CLAUDE_RESULT, {"type": "text", "text": "reminder"}]},
            ],
            "tools": [CLAUDE_TOOL],
        },
        ["question", "look", "inn", "found", "reminder"],
    ),
    "a system message among others": (
        "messages",
        {
            "system": [{"type": "text", "text": "rule"}],
            "messages": [
                SAID,
                {"role": "system", "content": "reminder"},
                {"role": "assistant", "content": "answer"},
                {"role": "user", "content": "more"},
                {"role": "system", "content": [{"type": "text", "text": "late"}]},
            ],
        },
        ["rule", "question", "reminder", "answer", "more", "late"],
    ),
    "a function call alone": (
        "responses",
        {
            "instructions": "rule",
            "input": [
                {"role": "developer", "content": "advice"},
                SAID,
                CALL_ITEM,
                RESULT_ITEM,
                {"role": "user", "content": "more"},
            ],
            "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}],
        },
        ["advice", "question", "look", "inn", "found", "more"],
    ),
    "reasoning and a call": (
        "responses",
        {
            "input": [
                SAID,
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                CALL_ITEM,
                RESULT_ITEM,
            ]
        },
        ["question", "look", "inn", "found"],
    ),
}


@pytest.fixture(scope="module", params=SOURCES)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFrontend]:
    model = write_reasoning_model(tmp_path_factory.mktemp("model"), SOURCES[request.param])
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END}))

    def without_store(config: FrontendConfig) -> FrontendConfig:
        return structs.replace(config, store=False)

    with shared_frontend(model, without_store) as found:
        yield found


def test_conversations_of_real_clients_are_rendered_with_all_their_texts(running: SharedFrontend) -> None:
    engine = running.renewed_engine()
    for name, (route, fields, texts) in REQUESTS.items():
        limit = "max_output_tokens" if route == "responses" else "max_tokens"
        body = {"model": "fake-model", limit: 1, **fields}
        reply = post(f"{running.server.url}/v1/{route}", json=body)
        assert reply.status_code == 200, (name, reply.text)
        ids = unpack_ids(engine.submits[-1].prompt_ids)
        prompt = RAW.decode(ids, skip_special_tokens=False)
        assert [text for text in texts if text not in prompt] == [], (name, prompt)
        if route == "messages":
            counted = post(f"{running.server.url}/v1/messages/count_tokens", json={"model": "fake-model", **fields})
            assert counted.json() == {"input_tokens": len(ids)}
        elif route == "responses":
            counted = post(f"{running.server.url}/v1/responses/input_tokens", json={"model": "fake-model", **fields})
            assert counted.json()["input_tokens"] == len(ids)
        else:
            shown = post(f"{running.server.url}/tokenize", json={"model": "fake-model", **fields})
            assert shown.json()["tokens"] == ids


def test_a_batch_of_such_conversations_succeeds(running: SharedFrontend, tmp_path: Path) -> None:
    chats = [(name, fields) for name, (route, fields, _) in REQUESTS.items() if route == "chat/completions"]
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "fake-model", "max_tokens": 1, **fields},
        }
        for name, fields in chats
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["run-batch", "--url", running.server.url, str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    assert main(argv) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == sorted(name for name, _ in chats)
    assert {one["response"]["status_code"] for one in found} == {200}
