"""Messages as templates take them: nothing is lost or refused, and what a template renders is left as it is."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.frontend.chat.adapted_messages import adapted
from tandem.frontend.chat.chat_template import TEMPLATES, ChatTemplate
from tandem.frontend.chat.template_traits import TemplateTraits
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.errors import ApiError
from tandem.frontend.request.conversation import Conversation
from tandem.protocol.model_folder import TemplateSource
from tests.fakes.tokenizer import BEGIN, END, byte_level_tokenizer
from tests.support.published_templates import PUBLISHED
from tests.support.rendering import adapted_prompt, rendered, traits_of

TOKENS = {"bos_token": BEGIN, "eos_token": END}
MODELS = {**PUBLISHED, **{f"own {path.stem}": {"default": path.read_text()} for path in TEMPLATES.glob("*.jinja")}}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_it_up", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


def says(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


def calls(*values: str, **fields: Any) -> dict[str, Any]:
    """A message with a call for each value, which is its argument."""
    found = [
        {"id": f"call_{value}", "type": "function", "function": {"name": "look_it_up", "arguments": {"at": value}}}
        for value in values
    ]
    return {"role": "assistant", "tool_calls": found, **fields}


def result(value: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{value}", "content": f"result of {value}"}


U1, U2, U3 = (says("user", f"question {word}") for word in ("one", "two", "three"))
A1, A2 = (says("assistant", f"answer {word}") for word in ("one", "two"))
S1, S2 = (says("system", f"rule {word}") for word in ("one", "two"))
D1 = says("developer", "advice one")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [U1],
    "a system prompt": [S1, U1],
    "several turns": [S1, U1, A1, U2],
    "a developer": [D1, U1],
    "two systems": [S1, S2, U1],
    "system and developer": [S1, D1, U1],
    "developer and system": [D1, S1, U1, A1, U2],
    "a later system": [U1, A1, S1, U2],
    "a system at the end": [U1, A1, U2, S1],
    "a system before the answer": [U1, S1, A1, U2],
    "a system within a call": [U1, calls("inn"), S1, result("inn")],
    "systems everywhere": [S1, D1, U1, S2, A1, says("developer", "advice two"), U2, says("system", "rule three")],
    "a system alone": [S1],
    "users in a row": [U1, U2, A1, U3],
    "assistants in a row": [U1, A1, A2, U2],
    "the assistant first": [A1, U1],
    "a system and the assistant first": [S1, A1, U1],
    "a call without content": [U1, calls("inn"), result("inn")],
    "a call with empty content": [U1, calls("inn", content=""), result("inn")],
    "a call after a thought": [U1, calls("inn", reasoning_content="hm"), result("inn"), A1, U2],
    "a system prompt and a call": [S1, U1, calls("inn"), result("inn")],
    "a system prompt and a reminder": [S1, U1, calls("inn"), result("inn"), U2],
    "a chain of calls": [U1, calls("inn"), result("inn"), calls("bar"), result("bar"), A1, U2],
    "parallel calls": [S1, U1, calls("inn", "bar"), result("inn"), result("bar"), A1, U2],
    "parallel calls with results in another order": [U1, calls("inn", "bar"), result("bar"), result("inn")],
    "a result and a reminder": [U1, calls("inn"), result("inn"), U2],
    "results and reminders": [U1, calls("inn"), result("inn"), U2, S1, calls("bar"), result("bar"), U3],
    "a reminder before the result": [U1, calls("inn"), U2, result("inn"), A1, U3],
    "a call without a result": [U1, calls("inn"), U2, A1, U3, calls("bar")],
    "a thought without content": [U1, {"role": "assistant", "reasoning_content": "hm"}, U2],
    "a thought with empty content": [U1, says("assistant", "", reasoning_content="hm"), U2],
}


def template_of(model: str) -> ChatTemplate:
    return ChatTemplate(TemplateSource(MODELS[model], "a test"), TOKENS)


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    """The texts of a conversation, with the names and arguments of its calls."""
    texts = [message["content"] for message in messages if message.get("content")]
    for message in messages:
        for call in message.get("tool_calls", ()):
            texts += [call["function"]["name"], call["function"]["arguments"]["at"]]
    return texts


@pytest.mark.parametrize("tools", [(), (LOOK,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("model", MODELS)
def test_every_template_renders_every_conversation(model: str, tools: tuple[dict[str, Any], ...]) -> None:
    template = template_of(model)
    for name, messages in CONVERSATIONS.items():
        prompt = adapted_prompt(template, Conversation(messages, tools))
        assert [text for text in texts_of(messages) if text not in prompt] == [], (name, prompt)
        assert not tools or "look_it_up" in prompt
        assert "None" not in prompt


@pytest.mark.parametrize("tools", [(), (LOOK,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("model", MODELS)
def test_what_a_template_renders_stays_equal_to_transformers(model: str, tools: tuple[dict[str, Any], ...]) -> None:
    template = template_of(model)
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **TOKENS)
    same = 0
    for name, messages in CONVERSATIONS.items():
        conversation = Conversation(messages, tools)
        try:
            plain = rendered(template, conversation)
        except ApiError:
            continue
        source = MODELS[model][template.name_for(conversation)]
        assert plain == theirs.apply_chat_template(
            messages, tools=list(tools) or None, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        shown = [*texts_of(messages), *(["look_it_up"] if tools else [])]
        # Gemma's rule lets any role but the user's come second.
        by_accident = model in ("gemma2", "gemma3") and name == "a system at the end"
        changed = by_accident or any(message["role"] == "developer" for message in messages)
        if all(text in plain for text in shown) and not changed:
            assert adapted_prompt(template, conversation) == plain, name
            same += 1
    assert same >= 3 or tools


@pytest.mark.parametrize("model", MODELS)
def test_arguments_of_a_truncated_call_are_rendered(model: str) -> None:
    call = calls("inn")
    call["tool_calls"][0]["function"]["arguments"] = '{"at": "the in'
    for messages in ([U1, call, result("inn")], [U1, call, result("inn"), A1, U2]):
        prompt = adapted_prompt(template_of(model), Conversation(messages, (LOOK,)))
        for text in ("look_it_up", "the in", "result of inn"):
            assert text in prompt


def test_leading_texts_are_merged_and_later_ones_open_the_next_question() -> None:
    prompt = adapted_prompt(template_of("gemma3"), Conversation([S1, D1, U1, S2, A1, says("system", "late"), U2, S1]))
    assert prompt == (
        f"{BEGIN}<start_of_turn>user\nrule one\n\nadvice one\n\nquestion one\n\nrule two<end_of_turn>\n"
        "<start_of_turn>model\nanswer one<end_of_turn>\n"
        "<start_of_turn>user\nlate\n\nquestion two\n\nrule one<end_of_turn>\n<start_of_turn>model\n"
    )


def test_tools_open_the_first_question_where_there_is_no_system() -> None:
    prompt = adapted_prompt(template_of("gemma2"), Conversation([S1, U1], (LOOK,)))
    assert prompt.startswith(f"{BEGIN}<start_of_turn>user\nrule one\n\nYou can call")
    assert prompt.endswith("\n\nquestion one<end_of_turn>\n<start_of_turn>model\n")
    assert prompt.count("<start_of_turn>user") == 1


@pytest.mark.parametrize("tools", [(), (LOOK,)])
def test_a_result_and_what_follows_it_are_one_turn(tools: tuple[dict[str, Any], ...]) -> None:
    conversation = Conversation([U1, calls("inn"), result("inn"), U2], tools)
    for model in ("gemma2", "gemma3"):
        prompt = adapted_prompt(template_of(model), conversation)
        assert prompt.count("<start_of_turn>user") == 2
        assert prompt.endswith(":\nresult of inn\n\nquestion two<end_of_turn>\n<start_of_turn>model\n")
    assert '{"content": result of inn\n\nquestion two, ' in adapted_prompt(template_of("mistral"), conversation)


def test_a_call_is_given_with_null_content_if_only_that_shows_it() -> None:
    for content in ({}, {"content": None}, {"content": ""}):
        prompt = adapted_prompt(template_of("deepseek"), Conversation([U1, calls("inn") | content, result("inn")]))
        assert '<call>function<sep>look_it_up\n```json\n{"at":"inn"}\n```' in prompt
    said = adapted_prompt(template_of("deepseek"), Conversation([U1, calls("inn", content="I look."), result("inn")]))
    assert said.index("<Assistant>I look.</s>") < said.index("<calls>")


def test_calls_of_a_message_are_shown_one_by_one_if_only_one_is_taken() -> None:
    messages = [U1, calls("inn", "bar", "pub"), result("bar"), result("inn"), U2]
    prompt = adapted_prompt(template_of("llama3"), Conversation(messages, (LOOK,)))
    order = ['"inn"}', "result of inn", '"bar"}', "result of bar", '"pub"}', "question two"]
    assert sorted(order, key=prompt.rindex) == order


def test_ids_have_nine_characters_if_others_are_not_taken() -> None:
    messages = [U1, calls("inn", "bar"), result("inn"), result("bar"), A1, U2]
    prompt = adapted_prompt(template_of("mistral"), Conversation(messages, (LOOK,)))
    ids = [part.split('"')[0] for part in prompt.split('id": "')[1:]]
    assert [len(one) for one in ids] == [9] * 4
    assert ids[:2] == ids[2:]
    kept = [U1, calls("inn"), result("inn")]
    kept[1]["tool_calls"][0]["id"] = kept[2]["tool_call_id"] = "abcDEF123"
    assert adapted_prompt(template_of("mistral"), Conversation(kept)).count("abcDEF123") == 2


def test_unknown_roles_become_their_equivalents() -> None:
    def shown(source: str) -> str:
        roles = Conversation([says(role, role) for role in ("developer", "user", "function")])
        template = ChatTemplate(TemplateSource({"default": source}, "a test"), {})
        found = adapted_prompt(template, roles)
        assert [message["role"] for message in roles.messages] == ["developer", "user", "function"]
        return found

    show = "{% for m in messages %}{{ m.role }}={{ m.content }}{{ m.tool_calls }} {% endfor %}"
    assert shown(show) == "system=developer user=user tool=function "
    assert shown(show.replace("{{ m.role }}", "{% if m.role == 'developer' %}!{% endif %}{{ m.role }}")) == (
        "!developer=developer user=user tool=function "
    )


def test_traits_of_a_template_that_shows_no_question_change_nothing() -> None:
    for source in ("a constant", "{{ raise_exception('no') }}", "{% for m in messages %}{{ m.role }}{% endfor %}"):
        assert traits_of("default", (("default", source),)) == TemplateTraits(developer=False)


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{{ messages[0].content }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}", True),
        ("{{ messages[0].content }}{{ tools | length if tools }}", True),
        ("{{ messages[0].content }}{# tools #}You have tools.{% set tools = 1 %}", False),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}", False),
        ("{% if tools is defined %}x{% endif %}{{ messages[0].content }}", False),
    ],
)
def test_tools_are_described_unless_the_template_shows_them(source: str, reads: bool) -> None:
    assert traits_of("default", (("default", source),)).tools == reads


def test_a_continued_message_without_text_is_left_for_the_refusal() -> None:
    traits = TemplateTraits(call_content={"missing": "empty"}, thought_content={"missing": "empty"})
    for last in (calls("inn"), {"role": "assistant", "reasoning_content": "hm"}):
        conversation = Conversation([U1, last], add_generation_prompt=False, continue_final_message=True)
        assert adapted(conversation, traits, FORMATS["json"].syntax).messages[-1] == last


def test_thousands_of_messages_are_joined_once() -> None:
    traits = traits_of("default", tuple(MODELS["gemma2"].items()))
    many = Conversation([U1] * 4000 + [A1] * 4000 + [S1] * 4000)
    user, assistant, last = adapted(many, traits, FORMATS["json"].syntax).messages
    assert [found["content"].count("one") for found in (user, assistant, last)] == [4000] * 3
