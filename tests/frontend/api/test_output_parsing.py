"""Reasoning and tool calls of models with tags as tokens, on the three chat routes, in front of a fake engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.codec import unpack_ids
from tests.support.byte_grammar import verdict
from tests.support.chat_routes import IDS, QUESTION, RAW, ROUTES, Route, encode
from tests.support.published_templates import PUBLISHED
from tests.support.shared_frontend import SharedFrontend, shared_frontend

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{{ calls(m) }}\n{% endfor %}"
TEMPLATES = {
    "qwen": "{% macro calls(m) %}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endmacro %}" + TURNS,
    "mistral": "{% macro calls(m) %}{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]"
    "{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{% endmacro %}"
    "Think within [THINK] and [/THINK].\n{% if tools %}{{ tools | length }}{% endif %}" + TURNS,
    "qwen_coder": PUBLISHED["qwen3_coder"]["default"],
    # Neither calls nor tools: the type of the text model tells the format.
    "bare": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
TYPES = {
    "qwen": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
    # The type of models whose calls are JSON as well.
    "qwen_coder": {"model_type": "qwen3_moe"},
    "bare": {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
}
ARGUMENTS = '{"at": "köln"}'
THINK = ("<think>", "</think>")
TAGS = {"qwen": THINK, "qwen_coder": THINK, "mistral": ("[THINK]", "[/THINK]")}
CALLS = {
    "qwen": f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n' * 2,
    "qwen_coder": "<tool_call>\n<function=look>\n<parameter=at>\nköln\n</parameter>\n</function>\n</tool_call>\n" * 2,
    "mistral": "".join(
        f"[TOOL_CALLS]look[CALL_ID]{call_id}[ARGS]{ARGUMENTS}" for call_id in ("abcdefgh1", "abcdefgh2")
    ),
}


def write_model(folder: Path, name: str) -> Path:
    RAW.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        TEMPLATES[name] + "{% if add_generation_prompt %}assistant:{{ opening }}{% endif %}"
    )
    (folder / "config.json").write_text(json.dumps(TYPES[name]))
    return folder


Model = tuple[str, SharedFrontend]
"""Name of a model, and the frontend that serves it."""


@pytest.fixture(scope="module", params=["qwen", "qwen_coder", "mistral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with shared_frontend(write_model(tmp_path_factory.mktemp("model"), request.param)) as running:
        yield request.param, running


@pytest.fixture
def model(served: Model) -> Model:
    served[1].renewed_engine()
    return served


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
