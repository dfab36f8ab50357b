"""Template lookup and rendering, compared with transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.frontend.chat.chat_template import (
    MODEL_TEMPLATES,
    TEMPLATES,
    ChatTemplate,
    ChatTemplateError,
    load_chat_template,
)
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.tokenizer import Tokenizer, load_tokenizer
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.model_folder import TemplateSource, special_tokens
from tests.fakes.tokenizer import BEGIN, END, write_tokenizer
from tests.support.rendering import rendered

TOKENS = {"bos_token": BEGIN, "eos_token": END}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter in einer Stadt <jetzt> & später, größer als 0°",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["köln", "北京"]}}},
    },
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(name: str, arguments: dict[str, Any], call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER_CALL = call("weather", {})
HELLO = {"role": "user", "content": 'Hallo 🙂, "quotes" & <tags>'}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [HELLO],
    "blanks": [{"role": "user", "content": "  two\n\nlines \n"}],
    "a system prompt": [{"role": "system", "content": "Sei höflich."}, HELLO],
    "several turns": [
        {"role": "system", "content": "Short answers."},
        HELLO,
        {"role": "assistant", "content": "Hallo!"},
        {"role": "user", "content": "你好"},
        {"role": "assistant", "content": " 你好。"},
        {"role": "user", "content": "bye"},
    ],
    "a call": [
        HELLO,
        {"role": "assistant", "tool_calls": [call("weather", {"city": "北京", "days": [1, 2.5, None, True]})]},
        {"role": "tool", "content": '{"t": "3°"}', "tool_call_id": "abcdefghi", "name": "weather"},
    ],
    "two calls and an answer": [
        {"role": "system", "content": "Use tools."},
        HELLO,
        {"role": "assistant", "content": "I ask.", "tool_calls": [WEATHER_CALL, call("add", {"a": {}}, "bbbbbbbbb")]},
        {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "4", "tool_call_id": "bbbbbbbbb"},
        {"role": "assistant", "content": "Three and four."},
        {"role": "user", "content": "thanks"},
    ],
    "thoughts": [
        HELLO,
        {"role": "assistant", "content": "Yes.", "reasoning_content": "\nHm.\n"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nYes.", "tool_calls": [call("add", {"a": 1})]},
        {"role": "tool", "content": "2", "tool_call_id": "abcdefghi"},
    ],
}  # fmt: skip
TOOLS: dict[str, tuple[dict[str, Any], ...]] = {"no tools": (), "two tools": (WEATHER, ADD)}

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}{% endif %}"""
CHATML_TOOLS = """{{ bos_token }}<tools>{% for tool in tools or [] %}{{ tool | tojson(indent=2) }}
{% endfor %}</tools>
{%- for message in messages if message.role != 'system' %}
  {%- set content = message.content | default('', true) %}
  {%- if message.tool_calls is defined and message.tool_calls %}
    {%- for tool_call in message.tool_calls %}
{{- '\n<tool_call>' }}{{ {'name': tool_call.function.name, 'arguments': tool_call.function.arguments} | tojson }}
    {%- endfor %}
  {%- endif %}
{{ loop.index }}/{{ loop.length }} {{ message.role | upper }}: {{ content.strip() }}{{ eos_token if loop.last }}
{%- endfor %}"""
STATEFUL = """{%- set ns = namespace(first=true, system='', names=[]) -%}
{%- for m in messages -%}{%- if m['role'] == 'system' -%}{%- set ns.system = ns.system ~ m['content'] -%}{%- endif -%}
{%- endfor -%}{{- bos_token }}{{ ns.system }}{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{%- set ns.first = false -%}{{- '<User>' ~ m['content'] -}}
{%- elif m['role'] == 'assistant' -%}{%- generation -%}
{{- '<Assistant>' ~ (m.get('content') or '').split('</think>')[-1] -}}
{%- endgeneration -%}{%- if 'tool_calls' in m -%}{%- set ns.names = ns.names + [m.tool_calls[0].function.name] -%}
{%- endif -%}{%- elif m['role'] == 'tool' -%}{%- if ns.first -%}{%- continue -%}{%- endif -%}
{{- m | tojson -}}{%- endif -%}
{%- endfor -%}{{ ns.names | join('+') }}{% if add_generation_prompt %}<Assistant>{% endif %}{{ strftime_now('%Y') }}"""

SOURCES = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")} | {
    "chatml": CHATML, "chatml with tools": CHATML_TOOLS, "stateful": STATEFUL,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path, with_begin=True)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **TOKENS)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(TemplateSource({"default": source}, "a test"), TOKENS)


@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", SOURCES)
def test_render_matches_transformers(
    name: str, messages: str, tools: str, theirs: PreTrainedTokenizerFast, tokenizer: Tokenizer
) -> None:
    conversation = Conversation(CONVERSATIONS[messages], TOOLS[tools])
    ours = template(SOURCES[name])

    def expected(**more: Any) -> Any:
        return theirs.apply_chat_template(
            CONVERSATIONS[messages],
            tools=list(TOOLS[tools]) or None,
            chat_template=SOURCES[name],
            **{"add_generation_prompt": True, "tokenize": False, **more},
        )

    prompt = rendered(ours, conversation, IgnoredFields())
    assert prompt == expected()
    assert tokenizer._encode(prompt, add_special_tokens=False) == expected(tokenize=True, return_dict=False)
    last = conversation.messages[-1]
    closed = Conversation(conversation.messages, conversation.tools, add_generation_prompt=False)
    assert rendered(ours, closed, IgnoredFields()) == expected(add_generation_prompt=False)
    if last["role"] != "tool" and last["content"] == last["content"].strip():
        continued = Conversation(conversation.messages, conversation.tools, False, continue_final_message=True)
        prompt = rendered(ours, continued, IgnoredFields())
        assert prompt == expected(add_generation_prompt=False, continue_final_message=True)


def test_template_kwargs_reach_the_template(theirs: PreTrainedTokenizerFast) -> None:
    conversation = Conversation([HELLO], template_kwargs={"enable_thinking": False})
    prompt = rendered(template(SOURCES["qwen3"]), conversation, IgnoredFields())
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert prompt == theirs.apply_chat_template(
        [HELLO], chat_template=SOURCES["qwen3"], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


def test_trimmed_last_message_is_continued_at_its_end() -> None:
    messages = [HELLO, {"role": "assistant", "content": "Once upon a "}]
    continued = Conversation(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered(template(SOURCES["llama3"]), continued, IgnoredFields()).endswith("Once upon a")
    assert rendered(template(CHATML), continued, IgnoredFields()).endswith("Once upon a ")


def refused(source: str, conversation: Conversation) -> ApiError:
    with pytest.raises(ApiError) as caught:
        rendered(template(source), conversation, IgnoredFields())
    return caught.value


def test_last_message_that_cannot_be_continued_is_rejected() -> None:
    def continued(message: dict[str, Any]) -> Conversation:
        return Conversation([HELLO, message], add_generation_prompt=False, continue_final_message=True)

    calls = {"role": "assistant", "tool_calls": [call("add", {})]}
    assert refused(CHATML, continued(calls)).param == "continue_final_message"
    dropped = "{{ messages[0].content }}"
    assert refused(dropped, continued({"role": "assistant", "content": "x"})).param == "continue_final_message"


def test_template_failure_is_a_400_with_its_reason() -> None:
    error = refused("{{ raise_exception('roles must alternate') }}", Conversation([HELLO]))
    assert (error.status, error.param) == (400, "messages")
    assert "roles must alternate" in error.message
    assert refused("{% for x in y %}", Conversation([HELLO])).status == 400
    assert refused("{{ messages[0].nothing.more }}", Conversation([HELLO])).status == 400


def test_reasoning_effort_is_passed_to_templates_that_read_it() -> None:
    def effort(value: str) -> Conversation:
        return Conversation([HELLO], reasoning_effort=value)

    assert rendered(template("{{ reasoning_effort }}"), effort("low"), IgnoredFields()) == "low"
    assert rendered(template("{{ enable_thinking }}"), effort("none"), IgnoredFields()) == "False"
    assert rendered(template("{{ enable_thinking }}"), effort("high"), IgnoredFields()) == "True"
    ignored = IgnoredFields()
    rendered(template(CHATML), effort("low"), ignored)
    assert ignored.paths == ("reasoning_effort",)


@pytest.mark.parametrize(
    ("source", "expected", "ignored"),
    [("{{ enable_thinking }}", "False", ()), ("{{ thinking }}", "False", ()), ("x", "x", ("think",))],
)
def test_thinking_is_passed_to_templates_that_read_it(source: str, expected: str, ignored: tuple[str, ...]) -> None:
    recorded = IgnoredFields()
    wanted = Conversation([HELLO], reasoning_effort=None, thinking=False, thinking_field="think")
    assert rendered(template(source), wanted, recorded) == expected
    assert recorded.paths == ignored


def test_documents_are_passed_to_templates_that_read_them() -> None:
    wanted = Conversation([HELLO], documents=({"text": "a"},))
    assert rendered(template("{{ documents[0].text }}"), wanted, IgnoredFields()) == "a"
    error = refused(CHATML, wanted)
    assert (error.status, error.param, error.code) == (400, "documents", "unsupported_parameter")


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja")
        path = path if path.suffix else path.with_name(path.name + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


Rendering = Callable[..., str]


@pytest.fixture
def shown(tmp_path: Path, tokenizer: Tokenizer) -> Rendering:
    """Render one question with the template of the directory `tmp_path`."""

    def show(tools: tuple[dict[str, Any], ...] = ()) -> str:
        loaded = load_chat_template(tmp_path, None, tokenizer)
        assert loaded is not None
        return rendered(loaded, Conversation([HELLO], tools), IgnoredFields())

    return show


def test_checkpoint_template_is_read_from_a_string(tmp_path: Path, shown: Rendering) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "one {{ bos_token }}", "bos_token": {"content": "<b>"}})
    assert shown() == "one <b>"


def test_checkpoint_template_is_read_from_a_list(tmp_path: Path, shown: Rendering) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert (shown(), shown((ADD,))) == ("plain", "tools")
    write(tmp_path, tokenizer_config={"chat_template": named[1:]})
    with pytest.raises(ApiError, match="--chat-template") as caught:
        shown()
    assert caught.value.status == 400


def test_checkpoint_template_is_read_from_a_file(tmp_path: Path, shown: Rendering) -> None:
    write(
        tmp_path, tokenizer_config={"chat_template": "from the configuration"}, chat_template={"chat_template": "json"}
    )
    assert shown() == "from the configuration"
    write(tmp_path, tokenizer_config={})
    assert shown() == "json"
    write(tmp_path, chat_template_jinja="from the file")
    write(tmp_path, additional_chat_templates__tool_use_jinja="for tools")
    assert (shown(), shown((ADD,))) == ("from the file", "for tools")


def test_special_tokens_are_read_from_both_config_files(tmp_path: Path) -> None:
    write(tmp_path, special_tokens_map={"bos_token": "<old>", "unk_token": "<unk>"})
    config = {
        "bos_token": {"content": "<new>"},
        "eos_token": "<end>",
        "pad_token": None,
        "additional_special_tokens": [],
    }
    write(tmp_path, tokenizer_config=config)
    assert special_tokens(tmp_path) == {"bos_token": "<new>", "eos_token": "<end>", "unk_token": "<unk>"}


class Vocabulary:
    """A tokenizer that has these tokens."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def token_id(self, token: str) -> int | None:
        return self.tokens.index(token) if token in self.tokens else None


@pytest.mark.parametrize("model_type", MODEL_TEMPLATES)
def test_built_in_template_is_used_for_a_known_model_type(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, config={"model_type": model_type})
    name, token = MODEL_TEMPLATES[model_type]
    has: Any = Vocabulary(token)
    loaded = load_chat_template(tmp_path, None, has)
    assert loaded is not None
    assert loaded.source.texts["default"] == SOURCES[name]
    assert token in rendered(loaded, Conversation([HELLO]), IgnoredFields())
    lacks: Any = Vocabulary()
    assert load_chat_template(tmp_path, None, lacks) is None


def test_unknown_model_type_has_no_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert load_chat_template(tmp_path, None, tokenizer) is None
    write(tmp_path, config={"model_type": "unheard-of"}, tokenizer_config={})
    assert load_chat_template(tmp_path, None, tokenizer) is None


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "chat_template", "config"])
@pytest.mark.parametrize("given", [False, True])
def test_damaged_settings_are_not_taken_for_a_model_without_a_template(
    name: str, given: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Of a template that is given only the special tokens come from the folder."""
    write(tmp_path, given_jinja="given")
    write(tmp_path, **{name: "no json"})
    if given and name in ("chat_template", "config"):
        assert load_chat_template(tmp_path, tmp_path / "given.jinja", tokenizer) is not None
        return
    with pytest.raises(ChatTemplateError, match=rf"{name}\.json\b"):
        load_chat_template(tmp_path, tmp_path / "given.jinja" if given else None, tokenizer)


def test_given_template_file_takes_precedence(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "own", "eos_token": "<e>"}, given_jinja="given {{ eos_token }}")
    loaded = load_chat_template(tmp_path, tmp_path / "given.jinja", tokenizer)
    assert loaded is not None
    assert rendered(loaded, Conversation([HELLO]), IgnoredFields()) == "given <e>"
    write(tmp_path, given_jinja="{% if %}")
    with pytest.raises(ChatTemplateError, match=r"given\.jinja.*\b1\b"):
        load_chat_template(tmp_path, tmp_path / "given.jinja", tokenizer)
    with pytest.raises(ChatTemplateError, match=r"missing\.jinja"):
        load_chat_template(tmp_path, tmp_path / "missing.jinja", tokenizer)


@pytest.mark.parametrize("form", ["string", "named", "file"])
def test_checkpoint_templates_are_found_as_transformers_finds_them(form: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, with_begin=True)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CHATML_TOOLS}]
    if form == "file":
        write(tmp_path, chat_template_jinja=STATEFUL)
    else:
        config["chat_template"] = CHATML_TOOLS if form == "string" else named
    write(tmp_path, tokenizer_config=config)
    assert_renders_as_transformers(tmp_path, CONVERSATIONS)


def test_default_model_renders_as_transformers_does() -> None:
    plain = {name: messages for name, messages in CONVERSATIONS.items() if all("content" in m for m in messages)}
    assert_renders_as_transformers(Path(__file__).parents[3] / "engine_core" / "default_model", plain)


def assert_renders_as_transformers(folder: Path, conversations: dict[str, list[dict[str, Any]]]) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    ours = load_chat_template(folder, None, tokenizer)
    assert ours is not None
    for messages in conversations.values():
        for tools in TOOLS.values():
            prompt = rendered(ours, Conversation(messages, tools), IgnoredFields())
            fields: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True}
            assert prompt == theirs.apply_chat_template(messages, tokenize=False, **fields)
            ids = theirs.apply_chat_template(messages, return_dict=False, **fields)
            assert tokenizer._encode(prompt, add_special_tokens=False) == ids
