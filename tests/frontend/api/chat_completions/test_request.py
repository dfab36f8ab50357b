"""Parsing of the body of a chat, field by field, and its description in `/openapi.json`."""

from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from tandem.frontend.api.chat_completions.request import BODY
from tandem.frontend.api.completions import request as completions
from tandem.frontend.request.conversation import MESSAGES_FIELD, RENDERING_FIELDS
from tandem.frontend.request.messages import MAX_MESSAGES, MAX_PARTS
from tandem.frontend.request.options import INT32_MAX, OPTION_FIELDS
from tandem.frontend.request.tools import MAX_TOOLS, Tool, ToolChoice
from tests.support.chat_bodies import ADD, LOOK, USER, described, parse, refused, tolerant
from tests.support.refusals import check_taken_or_refused_by_name

NAMED = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
_MORE_THAN_SCHEMA = ("tool_choice", "store", "service_tier", "verbosity")
_NOT_IN_SCHEMA = ("messages[1].prefix", "messages[1].mood", "messages[1].tool_calls")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", "somebody"), ("metadata", {"a": "b"}), ("safety_identifier", "x"), ("prompt_cache_key", "x"),
        ("prompt_cache_options", {"mode": "implicit"}), ("store", False), ("store", None), ("service_tier", "auto"),
        ("service_tier", "default"), ("modalities", ["text"]), ("modalities", None), ("verbosity", "medium"),
        ("tools", []), ("tools", None), ("tool_choice", "none"), ("tool_choice", "auto"), ("tool_choice", None),
        ("logprobs", False), ("logprobs", None), ("top_logprobs", None), ("top_logprobs", 0), ("max_tokens", None),
        ("max_completion_tokens", None), ("n", None), ("stop", []), ("priority", 0), ("chat_template_kwargs", {}),
        ("add_generation_prompt", True), ("continue_final_message", False), ("reasoning_effort", None),
        ("skip_special_tokens", True), ("include_stop_str_in_output", False), ("response_format", None),
        ("session_id", None), ("cache_salt", None),
    ],
)  # fmt: skip
def test_chat_accepts_values_that_change_nothing(name: str, value: Any) -> None:
    assert parse(**{name: value}) == parse()
    assert described(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True), ("service_tier", "flex"), ("modalities", ["text", "audio"]), ("audio", {"voice": "x"}),
        ("web_search_options", {}), ("mirostat", 2), ("n_predict", 5), ("logits_processors", ["x"]),
        ("moderation", {"model": "x"}), ("priority", 101), ("best_of", 2),
        ("priority", -101), ("session_id", ""), ("session_id", "x" * 257), ("cache_salt", ""),
        ("echo", True), ("prompt", "x"), ("chat_template", "x"), ("n", 0),
        ("n", 129), ("max_tokens", 0), ("max_completion_tokens", 0), ("temperature", 2.5), ("top_p", -0.1),
        ("seed", -2), ("max_tokens", -2),
        ("stop", ["a"] * 257), ("top_logprobs", 21), ("tool_choice", "required"), ("tool_choice", "some"),
        ("tool_choice", NAMED), ("reasoning_effort", "extreme"), ("messages", [USER] * (MAX_MESSAGES + 1)),
        ("tools", [LOOK] * (MAX_TOOLS + 1)), ("prompt_logprobs", 21),
        ("prompt_logprobs", -1), ("use_beam_search", True),
    ],
)  # fmt: skip
def test_chat_rejects_unsupported_values_with_400_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert (error.status, error.param) == (400, name)
    assert name in error.message
    # That a choice of tools needs tools is more than a schema of one field can say; other fields may be ignored.
    assert name in _MORE_THAN_SCHEMA or value == 0 or name not in BODY.names or not described(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 1), ("messages", None), ("messages", []), ("messages", "hi"), ("messages", {}),
        ("logprobs", 1), ("top_logprobs", True), ("max_completion_tokens", "9"), ("tools", {}), ("tool_choice", 1),
        ("parallel_tool_calls", 1), ("add_generation_prompt", "x"), ("continue_final_message", 1), ("stream", 1),
        ("chat_template_kwargs", []), ("reasoning_effort", 1), ("response_format", "json"), ("regex", 1),
        ("grammar", []), ("choice", 1), ("skip_special_tokens", 0), ("include_stop_str_in_output", "no"),
    ],
)  # fmt: skip
def test_chat_rejects_wrong_types_with_400_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert (error.status, error.param) == (400, name)
    assert not described(**{name: value})


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        (USER, USER),
        ({"role": "system", "content": "x", "name": "s"}, {"role": "system", "content": "x", "name": "s"}),
        ({"role": "developer", "content": ""}, {"role": "developer", "content": ""}),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
         {"role": "user", "content": "a\nb"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None, "annotations": []},
         {"role": "assistant", "content": "x"}),
        ({"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
         {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]},
         {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "look", "arguments": {"a": 1}}}]}),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"},
         {"role": "assistant", "content": "x", "reasoning_content": "y"}),
        ({"role": "tool", "content": "3", "tool_call_id": "1"}, {"role": "tool", "content": "3", "tool_call_id": "1"}),
        ({"role": "function", "name": "f", "content": "3"}, {"role": "function", "name": "f", "content": "3"}),
        ({"role": "function", "name": "f", "content": None}, {"role": "function", "name": "f", "content": ""}),
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, {"role": "tool", "content": "", "tool_call_id": "1"}),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]},
         {"role": "user", "content": "a\nb"}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": "x", "reasoning": "y"},
         {"role": "assistant", "content": "x", "reasoning_content": "y"}),
        ({"role": "assistant", "content": "x", "prefix": False}, {"role": "assistant", "content": "x"}),
    ],
)  # fmt: skip
def test_messages_are_converted_for_templates(message: dict[str, Any], plain: dict[str, Any]) -> None:
    assert parse(messages=[USER, message]).conversation.messages == [USER, plain]
    assert described(
        messages=[USER, {name: value for name, value in message.items() if name not in ("audio", "annotations")}]
    )


@pytest.mark.parametrize(
    "arguments", ["", " ", "{}", '{"a": {"b": [1, "ü"]}}', "not json", "[1]", '"text"', '{"a": 1e999}']
)
def test_tool_call_arguments_stay_text_unless_an_object(arguments: str) -> None:
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    (message,) = parse(messages=[{"role": "assistant", "tool_calls": [call]}]).conversation.messages
    shown = message["tool_calls"][0]["function"]["arguments"]
    try:
        expected = msgspec.json.decode(arguments or "{}")
    except msgspec.MsgspecError:
        expected = None
    if not arguments.strip():
        expected = {}
    assert shown == (expected if isinstance(expected, dict) else arguments)


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        ({"content": "x"}, 400, "messages[1]"),
        ({"role": "user"}, 400, "messages[1]"),
        ({"role": "user", "content": 1}, 400, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, 400, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, 400, "messages[1].content[0]"),
        ({"role": "critic", "content": "x"}, 400, "messages[1].role"),
        ({"role": "user", "content": "x", "mood": "good"}, 400, "messages[1].mood"),
        ({"role": "user", "content": "x", "tool_calls": []}, 400, "messages[1].tool_calls"),
        ({"role": "user", "content": [{"type": "image_url"}]}, 400, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, 400, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, 400, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, 400, "messages[1].content[0].type"),
        ({"role": "assistant", "content": "x", "prefix": True}, 400, "messages[1].prefix"),
        ({"role": "assistant", "function_call": {"name": "f"}}, 400, "messages[1].function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "x"}}, 400, "messages[1].audio"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, 400, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, 400, "messages[1].tool_calls[0]"),
        ({"role": "tool", "content": "x"}, 400, "messages[1]"),
        ({"role": "function", "content": "x"}, 400, "messages[1]"),
        ("hi", 400, "messages[1]"),
    ],
)  # fmt: skip
def test_invalid_message_is_rejected_with_its_path(message: Any, status: int, param: str) -> None:
    error = refused(messages=[USER, message])
    assert (error.status, error.param) == (status, param)
    assert param in error.message
    # That an assistant says or calls something is more than the schema says; unknown names may be ignored.
    assert param in _NOT_IN_SCHEMA or not described(messages=[USER, message])


def test_media_content_is_rejected_with_a_hint() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    error = refused(messages=[image])
    assert (error.status, error.param) == (400, "messages[0].content[0].type") and "image_url" in error.message


def test_number_of_parts_is_bounded_before_decoding() -> None:
    parts = [{"type": "text", "text": ""}] * (MAX_PARTS + 1)
    assert "16384" in refused(messages=[{"role": "user", "content": parts}]).message
    text = '{"role": "user", "type": "text"}' * 20_000
    assert parse(messages=[{"role": "user", "content": text}]).conversation.messages[0]["content"] == text


def test_tools_are_parsed_for_template_and_grammar() -> None:
    request = parse(tools=[LOOK, ADD])
    shown = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert request.tool_use.tools == (
        Tool("look", {"type": "object"}, True, shown, "tools[0].function.parameters"),
        Tool("add", None, False, ADD, "tools[1].function.parameters"),
    )
    assert request.tool_use.choice == ToolChoice("auto")
    assert request.tool_use.active
    assert request.conversation.tools == (shown, ADD)
    assert described(tools=[LOOK, ADD])


def test_tool_choice_selects_mode_and_tools() -> None:
    def choose(choice: Any) -> ToolChoice:
        assert described(tools=[LOOK, ADD], tool_choice=choice)
        return parse(tools=[LOOK, ADD], tool_choice=choice).tool_use.choice

    assert choose("required") == ToolChoice("required")
    assert choose(NAMED) == ToolChoice("required", "look")
    none = parse(tools=[LOOK], tool_choice="none")
    assert not none.tool_use.active
    assert none.conversation.tools == ()
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
    }
    assert choose(allowed) == ToolChoice("required")
    assert [tool.name for tool in parse(tools=[LOOK, ADD], tool_choice=allowed).tool_use.tools] == ["add"]
    assert not parse(tools=[LOOK], parallel_tool_calls=False).tool_use.parallel


@pytest.mark.parametrize(
    ("tools", "choice", "status", "param"),
    [
        ([{"type": "custom", "custom": {"name": "x"}}], None, 400, "tools[0].type"),
        ([{"type": "function"}], None, 400, "tools[0]"),
        ([{"type": "function", "function": {}}], None, 400, "tools[0].function"),
        ([{"type": "function", "function": {"name": "a b"}}], None, 400, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], None, 400, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x" * 257}}], None, 400, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x", "parameters": 1}}], None, 400, "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "x", "extra": 1}}], None, 400, "tools[0].function.extra"),
        ([LOOK, LOOK], None, 400, "tools[1].function.name"),
        ([LOOK], {"type": "function", "function": {"name": "other"}}, 400, "tool_choice"),
        ([LOOK], {"type": "custom", "custom": {"name": "x"}}, 400, "tool_choice.type"),
        ([LOOK], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, 400, "tool_choice"),
    ],
)  # fmt: skip
def test_invalid_tools_are_rejected_with_their_path(tools: Any, choice: Any, status: int, param: str) -> None:
    error = refused(tools=tools, tool_choice=choice)
    assert (error.status, error.param) == (status, param)


def test_max_tokens_has_an_old_and_a_new_name() -> None:
    assert (parse().options.max_tokens, parse().options.max_tokens_by_default) == (1024, True)
    for fields in ({"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
        options = parse(**fields).options
        assert (options.max_tokens, options.max_tokens_by_default) == (7, False)
    assert refused(max_tokens=7, max_completion_tokens=8).param == "max_tokens"
    options, ignored = tolerant(max_tokens=7, max_completion_tokens=8)
    assert (options.options.max_tokens, ignored) == (8, ("max_tokens",))
    assert refused(max_tokens=7, min_tokens=8).param == "min_tokens"
    unlimited = parse(max_tokens=-1).options
    assert (unlimited.max_tokens, unlimited.max_tokens_by_default) == (INT32_MAX, True)


def test_top_logprobs_need_logprobs() -> None:
    assert parse().options.logprobs is None
    assert parse(logprobs=True).options.logprobs == 0
    assert parse(logprobs=True, top_logprobs=20).options.logprobs == 20
    assert refused(top_logprobs=1).param == "top_logprobs"


def test_template_extensions_reach_the_conversation() -> None:
    conversation = parse(
        continue_final_message=True, chat_template_kwargs={"a": 1}, reasoning_effort="low"
    ).conversation
    assert (conversation.add_generation_prompt, conversation.continue_final_message) == (False, True)
    assert (conversation.template_kwargs, conversation.reasoning_effort) == ({"a": 1}, "low")
    assert not parse(add_generation_prompt=False).conversation.add_generation_prompt
    assert refused(continue_final_message=True, add_generation_prompt=True).status == 400
    for name in ("messages", "bos_token", "eos_token", "tools", "raise_exception"):
        error = refused(chat_template_kwargs={name: "x"})
        assert (error.status, error.param) == (400, f"chat_template_kwargs.{name}")


def test_body_descriptions_are_valid_json_schemas() -> None:
    for schema in (BODY.schema(), completions.BODY.schema()):
        jsonschema.Draft202012Validator.check_schema(schema)
    assert {"model", "prompt", "echo", "n"} < set(completions.BODY.schema()["properties"])


def test_every_chat_field_of_the_official_client_is_known() -> None:
    """Check that each field is honoured, accepted with neutral values, or rejected as known."""
    ignored = {"user", "metadata", "safety_identifier"}
    ignored |= {name for name in CompletionCreateParamsBase.__annotations__ if name.startswith("prompt_cache")}
    unknown = refused(unheard="of")
    for name in set(CompletionCreateParamsBase.__annotations__) - {"messages", "model", *ignored}:
        error = refused(**{name: {"unheard": "of"}} if name != "response_format" else {name: "unheard"})
        assert (error.template, error.param) != (unknown.template, name)
    assert (unknown.status, unknown.param) == (400, "unheard")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "text", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "function", "name", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (*OPTION_FIELDS, MESSAGES_FIELD, *RENDERING_FIELDS)
names = st.sampled_from([*(field.name for field in FIELDS), "max_completion_tokens", "top_logprobs", "other"])


@given(st.dictionaries(names, json_values, max_size=4))
def test_chat_accepts_or_rejects_any_json_by_name(fields: dict[str, Any]) -> None:
    check_taken_or_refused_by_name(parse, fields)


def test_chat_reads_scheduling_fields() -> None:
    fields = {"priority": 7, "session_id": "talk/1", "cache_salt": "pepper"}
    options = parse(**fields).options
    assert (options.priority, options.session_id, options.cache_salt) == (7, "talk/1", "pepper")
    assert described(**fields)
    error = refused(session_id="talk", n=2)
    assert (error.status, error.param) == (400, "n")
