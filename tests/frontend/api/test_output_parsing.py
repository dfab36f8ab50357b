"""Reasoning and tool calls of models with tags as tokens, on the three chat routes, in front of a fake engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from tokenizers import AddedToken

from tandem.frontend.chat.tool_formats import ALL_TAGS
from tandem.protocol.codec import unpack_ids
from tests.fakes.tokenizer import byte_level_tokenizer
from tests.frontend.conftest import post
from tests.support.byte_grammar import verdict
from tests.support.shared_frontend import SharedFrontend, shared_frontend

RAW = byte_level_tokenizer()
RAW.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ALL_TAGS])
RAW.add_tokens([AddedToken("<|other|>", special=True)])
IDS = {tag: RAW.token_to_id(tag) for tag in ALL_TAGS}

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{{ calls(m) }}\n{% endfor %}"
TEMPLATES = {
    "qwen": "{% macro calls(m) %}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endmacro %}" + TURNS,
    "mistral": "{% macro calls(m) %}{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]"
    "{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{% endmacro %}"
    "Think within [THINK] and [/THINK].\n{% if tools %}{{ tools | length }}{% endif %}" + TURNS,
    # Neither calls nor tools: the type of the text model tells the format.
    "bare": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
TYPES = {
    "qwen": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
    "bare": {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
}
QUESTION = {"role": "user", "content": "how do I join two paths?"}
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
ARGUMENTS = '{"at": "köln"}'
TAGS = {"qwen": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
CALLS = {
    "qwen": f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n' * 2,
    "mistral": "".join(
        f"[TOOL_CALLS]look[CALL_ID]{call_id}[ARGS]{ARGUMENTS}" for call_id in ("abcdefgh1", "abcdefgh2")
    ),
}


class Answer(Struct):
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = []
    ending: str = ""
    reasoning_tokens: int = 0


class Route(Struct, frozen=True):
    """One of the routes, with what differs between them."""

    path: str
    server: SharedFrontend

    def ask(self, text: str, stream: bool, tools: bool = False, **fields: Any) -> Answer:
        """Ask a question that the engine answers with these tokens."""
        ids = encode(text)
        self.server.engine.script = lambda submit: ids[: submit.sampling.max_tokens]
        fields = {"messages": [QUESTION], "model": "fake-model", "stream": stream, **fields}
        return getattr(self, f"_{self.path}")(fields, tools)

    def _post(self, path: str, fields: dict[str, Any]) -> Any:
        response = post(f"{self.server.server.url}/v1/{path}", json=fields)
        assert response.status_code == 200, response.text
        if not fields["stream"]:
            return response.json()
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    def _chat(self, fields: dict[str, Any], tools: bool) -> Answer:
        given = {"tools": [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]}
        fields = {**fields, **(given if tools else {}), "stream_options": {"include_usage": True}}
        reply = self._post("chat/completions", fields if fields["stream"] else {**fields, "stream_options": None})
        answer = Answer()
        deltas = [reply["choices"][0]["message"]] if isinstance(reply, dict) else []
        chunks = [reply] if isinstance(reply, dict) else reply
        for chunk in chunks:
            for choice in chunk["choices"]:
                deltas += [choice["delta"]] if "delta" in choice else []
                answer.ending = choice["finish_reason"] or answer.ending
        for delta in deltas:
            answer.reasoning += delta.get("reasoning_content") or ""
            answer.content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                function = call["function"]
                if "name" in function:
                    answer.calls.append((function["name"], ""))
                answer.calls[-1] = (answer.calls[-1][0], answer.calls[-1][1] + function["arguments"])
        answer.reasoning_tokens = chunks[-1]["usage"].get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return answer

    def _messages(self, fields: dict[str, Any], tools: bool) -> Answer:
        if "stop" in fields:
            fields = {**fields, "stop_sequences": fields["stop"], "stop": None}
        given = {"tools": [{"name": "look", "input_schema": PARAMETERS}]} if tools else {}
        reply = self._post("messages", {"max_tokens": 200, **fields, **given})
        answer = Answer()
        if isinstance(reply, dict):
            for block in reply["content"]:
                answer.reasoning += block.get("thinking", "")
                answer.content += block.get("text", "")
                if block["type"] == "tool_use":
                    answer.calls.append((block["name"], json.dumps(block["input"], ensure_ascii=False)))
            answer.ending = reply["stop_reason"]
            answer.reasoning_tokens = reply["usage"]["output_tokens_details"]["thinking_tokens"]
            return answer
        for event in reply:
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                answer.calls.append((event["content_block"]["name"], ""))
            if event["type"] == "content_block_delta":
                delta = event["delta"]
                answer.reasoning += delta.get("thinking", "")
                answer.content += delta.get("text", "")
                if "partial_json" in delta:
                    answer.calls[-1] = (answer.calls[-1][0], answer.calls[-1][1] + delta["partial_json"])
            if event["type"] == "message_delta":
                answer.ending = event["delta"]["stop_reason"]
                answer.reasoning_tokens = event["usage"]["output_tokens_details"]["thinking_tokens"]
        return answer

    def _responses(self, fields: dict[str, Any], tools: bool) -> Answer:
        given = {"tools": [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}]}
        fields = {**fields, **(given if tools else {}), "input": fields["messages"]}
        del fields["messages"]
        reply = self._post("responses", fields)
        answer = Answer()
        last = reply if isinstance(reply, dict) else reply[-1]["response"]
        for item in last["output"]:
            if item["type"] == "function_call":
                answer.calls.append((item["name"], item["arguments"]))
            text = "".join(part["text"] for part in item.get("content", []))
            if item["type"] == "reasoning":
                answer.reasoning += text
            elif item["type"] == "message":
                answer.content += text
        answer.ending = last["status"]
        answer.reasoning_tokens = last["usage"]["output_tokens_details"]["reasoning_tokens"]
        return answer


def encode(text: str) -> list[int]:
    """Encode a text; what stands between ¦ and ¦ is spelled with tokens of a byte."""
    ids: list[int] = []
    for index, part in enumerate(text.split("¦")):
        for piece in list(part) if index % 2 else [part]:
            ids += RAW.encode(piece, add_special_tokens=False).ids
    return ids


def write_model(folder: Path, name: str) -> Path:
    RAW.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        TEMPLATES[name] + "{% if add_generation_prompt %}assistant:{{ opening }}{% endif %}"
    )
    (folder / "config.json").write_text(json.dumps(TYPES[name]))
    return folder


Model = tuple[str, SharedFrontend]
"""Name of a model, and the frontend that serves it."""


@pytest.fixture(scope="module", params=["qwen", "mistral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with shared_frontend(write_model(tmp_path_factory.mktemp("model"), request.param)) as running:
        yield request.param, running


@pytest.fixture
def model(served: Model) -> Model:
    served[1].renewed_engine()
    return served


ROUTES = ["chat", "messages", "responses"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_parallel_calls_are_parsed(model: Model, path: str, stream: bool) -> None:
    name, server = model
    start, end = TAGS[name]
    thought = f"{start}it ends with ¦{end}¦ they<|other|> say{end}"
    text = f"{thought}\n\nI look.{CALLS[name]}"
    for per_step in (1, 100):
        server.engine.tokens_per_step = per_step
        answer = Route(path, server).ask(text, stream, tools=True)
        assert answer.reasoning == f"it ends with {end} they say"
        assert (answer.content, answer.calls) == ("I look.", [("look", ARGUMENTS)] * 2)
        assert answer.ending in ("tool_calls", "tool_use", "completed")
        assert answer.reasoning_tokens == len(encode(thought))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_the_prompt_opens_is_parsed(model: Model, path: str, stream: bool) -> None:
    name, server = model
    start, end = TAGS[name]
    kwargs = {"chat_template_kwargs": {"opening": f"{start}\n"}}
    answer = Route(path, server).ask(f"on paths{end}\n\nuse join", stream, **kwargs)
    assert (answer.reasoning, answer.content) == ("on paths", "use join")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "messages"])
def test_reasoning_that_the_last_message_leaves_open_goes_on(model: Model, path: str, stream: bool) -> None:
    name, server = model
    start, end = TAGS[name]
    fields = {"continue_final_message": True} if path == "chat" else {}
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    wanted: dict[str, Any] = {
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }[path]
    for prefill, is_open in ((f"{start}\nSo on", True), (f"{start}a{end}", False), ("An answer", False)):
        messages = [QUESTION, {"role": "assistant", "content": prefill}]
        answer = Route(path, server).ask(f" paths{end}use join", stream, messages=messages, **fields)
        thought, content = (" paths", "use join") if is_open else ("", " pathsuse join")
        assert (answer.reasoning.strip(), answer.content) == (thought.strip(), content)
        Route(path, server).ask("x", stream, messages=messages, **fields, **wanted)
        constraint = server.engine.submits[-1].constraint
        assert constraint is not None
        judged = verdict(constraint, f'Hm{end}\n{{"a": null}}', IDS)
        assert judged == ("whole" if is_open else "wrong")
        assert verdict(constraint, '{"a": null}', IDS) == ("beginning" if is_open else "whole")


@pytest.mark.parametrize("path", ["chat", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_match_from_the_answer_on(model: Model, path: str, stream: bool) -> None:
    name, server = model
    start, end = TAGS[name]
    text = f"{start}a Question: here{end}\n\nuse a path. Question: there"
    for per_step in (1, 100):
        server.engine.tokens_per_step = per_step
        answer = Route(path, server).ask(text, stream, stop=["Question:"])
        assert (answer.reasoning, answer.content) == ("a Question: here", "use a path. ")
        answer = Route(path, server).ask(text, stream, stop=[end])
        assert (answer.reasoning, answer.content) == ("a Question: here", "")
        answer = Route(path, server).ask(f"a Question: here{end}use", stream, stop=["Question:"],
                                         chat_template_kwargs={"opening": start})  # fmt: skip
        assert (answer.reasoning, answer.content) == ("a Question: here", "use")
    assert Route(path, server).ask("a Question: here", stream, stop=["Question:"]).content == "a "


@pytest.mark.parametrize("path", ROUTES)
def test_a_required_call_is_held_to_the_form_of_the_template(model: Model, path: str) -> None:
    name, server = model
    choice: Any = {"type": "any"} if path == "messages" else "required"
    answer = Route(path, server).ask(CALLS[name].strip(), False, tools=True, tool_choice=choice)
    assert answer.calls == [("look", ARGUMENTS)] * 2
    constraint = server.engine.submits[-1].constraint
    assert constraint is not None
    start, end = TAGS[name]
    assert verdict(constraint, CALLS[name].strip(), IDS) == "whole"
    assert verdict(constraint, f"{start}Hm{end}{CALLS[name].strip()}", IDS) == "whole"
    assert verdict(constraint, CALLS[name].strip(), {}) == "wrong"


def test_the_format_follows_the_type_of_the_text_model(tmp_path: Path) -> None:
    with shared_frontend(write_model(tmp_path, "bare")) as server:
        for text in (
            CALLS["mistral"],
            f"[TOOL_CALLS]look[ARGS]{ARGUMENTS}" * 2,
            "[TOOL_CALLS][" + ", ".join([f'{{"name": "look", "arguments": {ARGUMENTS}}}'] * 2) + "]",
        ):
            answer = Route("chat", server).ask(text, False, tools=True)
            assert (answer.content, answer.calls) == ("", [("look", ARGUMENTS)] * 2)
            answer = Route("chat", server).ask(f"<think>Hm</think>{text}", False, tools=True, tool_choice="required")
            assert (answer.reasoning, answer.calls) == ("Hm", [("look", ARGUMENTS)] * 2)
        constraint = server.engine.submits[-1].constraint
        assert constraint is not None
        assert verdict(constraint, CALLS["mistral"], IDS) == "whole"
        prompt = RAW.decode(unpack_ids(server.engine.submits[-1].prompt_ids), skip_special_tokens=False)
        assert "[TOOL_CALLS]" in prompt


def test_tags_beyond_the_vocabulary_are_spelled_with_other_tokens(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen")
    # The prompt has none of the tags.
    (folder / "chat_template.jinja").write_text("{{ tools | length if tools }}{{ messages[0].content }}")
    with shared_frontend(folder, vocab_size=min(IDS.values())) as server:
        text = f"<think>Hm</think>{CALLS['qwen'].strip()}"
        answer = Route("chat", server).ask(f"¦{text}¦", False, tools=True, tool_choice="required")
        assert (answer.reasoning, answer.content, answer.calls) == ("Hm", "", [("look", ARGUMENTS)] * 2)
        constraint = server.engine.submits[-1].constraint
        assert constraint is not None
        assert verdict(constraint, text) == "whole"
