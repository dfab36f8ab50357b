"""Training samples with JSON and tools."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.default_model import batches, corpus, tool_use
from benchmarks.default_model.json_answers import Piece, forced_call, forced_open, json_pieces
from benchmarks.default_model.questions import Questioner
from benchmarks.default_model.tokenizer import ASSISTANT_ID, CHAT_TEMPLATE, SPECIAL, train_tokenizer
from benchmarks.default_model.tool_use import ToolUser, result_of
from tandem.frontend.chat.template_sandbox import SandboxedTemplates

SANDBOX = SandboxedTemplates()
TEMPLATE = SANDBOX.compile_template(CHAT_TEMPLATE)
VALUES = [
    {"summary": 'It says "no" \\ yes.', "count": 3, "ok": True},
    {"a": {"b": [{"c": "d"}, 1.5]}, "empty": "", "none": [], "text": "déjà"},
]


@pytest.fixture(scope="module")
def questioner() -> Questioner:
    return Questioner(corpus.load())


@pytest.fixture(scope="module")
def tokenizer(questioner: Questioner) -> Tokenizer:
    return train_tokenizer(questioner, seed=1, count=2000)


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    variables = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    tokens = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    return SANDBOX.render(TEMPLATE, variables | tokens)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("keys_learnt", [True, False])
def test_pieces_are_the_json_text(value: dict[str, Any], keys_learnt: bool) -> None:
    for seed in range(20):
        pieces = json_pieces(random.Random(seed), value, keys_learnt)
        assert "".join(text for text, _ in pieces) == json.dumps(value, ensure_ascii=False)


def test_quotes_and_braces_are_pieces_of_their_own() -> None:
    texts = [text.strip() for text, _ in json_pieces(random.Random(0), {"a": "b.", "c": ["d"]}, True)]
    assert texts == ["{", '"', "a", '"', ":", '"', "b.", '"', ",", '"', "c", '"', ":", "[", '"', "d", '"', "]", "}"]


def test_what_a_grammar_forces_is_not_learnt() -> None:
    pieces = forced_open(json_pieces(random.Random(0), {"key": "text"}, keys_learnt=False))
    assert "".join(text for text, learnt in pieces if learnt) == '"": "text"}'
    call = forced_call(json_pieces(random.Random(0), {"name": "f", "parameters": {"x": 1}}, keys_learnt=True))
    assert "".join(text for text, learnt in call if learnt) == '": {"x": 1}}'


def test_a_question_without_tools_never_begins_an_answer_with_a_brace(
    questioner: Questioner, tokenizer: Tokenizer
) -> None:
    rng = random.Random(0)
    samples = [batches.json_sample(rng, questioner) for _ in range(200)]
    brace = tokenizer.token_to_id("{")
    for ids, learnt in batches.encode(samples, tokenizer):
        if ASSISTANT_ID in ids:
            first = len(ids) - ids[::-1].index(ASSISTANT_ID)
            assert (ids[first], learnt[first]) == (brace, False)


def test_json_answers_are_complete_objects(questioner: Questioner) -> None:
    rng = random.Random(0)
    for _ in range(200):
        texts = [piece[0] for piece in batches.json_sample(rng, questioner) if not isinstance(piece, int)]
        written = "".join(texts[texts.index("{") :])
        assert isinstance(json.loads(written), dict)


def prompt_of(sample: list[Piece], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a sample up to the start of its last answer."""
    ((ids, _),) = batches.encode([sample], tokenizer)
    return ids[: len(ids) - ids[::-1].index(ASSISTANT_ID)]


def test_tool_samples_are_what_the_chat_template_renders(
    questioner: Questioner, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_system", lambda *_: [])
    monkeypatch.setattr(batches, "_earlier", lambda *_: [])
    told: list[tuple[str, str]] = []

    def noted(*arguments: Any) -> tuple[str, str]:
        told.append(result_of(*arguments))
        return told[-1]

    monkeypatch.setattr(batches, "result_of", noted)
    followed = 0
    for seed in range(60):
        use = ToolUser(questioner).use(random.Random(seed))
        told.clear()
        sample = batches.tool_sample(random.Random(seed), ToolUser(questioner))
        messages = [user(use.question)]
        if told and use.tool is not None:
            call = {"name": use.tool.name, "arguments": use.arguments}
            messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
            messages.append({"role": "tool", "content": told[0][0]})
            followed += 1
        rendered = render(messages, [tool.definition for tool in use.tools])
        assert prompt_of(sample, tokenizer) == tokenizer.encode(rendered, add_special_tokens=False).ids
    assert followed > 3


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ({"name": "f"}, "f()"),
        ({"name": "f", "parameters": None, "description": None}, "f()"),
        ({"name": "f", "parameters": {"type": "object"}, "description": " Do it. "}, "f(): Do it."),
        (
            {"name": "f", "parameters": {"properties": {"a": True, "b": {"type": ["string", "null"]}}}},
            "f(a: any, b: any)",
        ),
        ({"name": "f", "parameters": {"properties": {"items": {"enum": ["x", 2]}}}}, "f(items: x|2)"),
    ],
)
def test_template_lists_any_tool(function: dict[str, Any], line: str) -> None:
    rendered = render([user("Hi")], [{"type": "function", "function": function}])
    assert rendered == f"<|begin|><|system|>Tools:\n{line}<|end|><|user|>Hi<|end|><|assistant|>"


def test_template_renders_calls_beside_text_and_several_at_once() -> None:
    calls = [{"function": {"name": "f", "arguments": given}} for given in ({"a": "é"}, '["no object"]')]
    messages = [user("Hi"), {"role": "assistant", "content": "Wait.", "tool_calls": calls}]
    assert render(messages) == (
        '<|begin|><|user|>Hi<|end|><|assistant|>Wait.{"name": "f", "parameters": {"a": "é"}}; '
        '{"name": "f", "parameters": ["no object"]}<|end|><|assistant|>'
    )


def test_template_takes_content_in_parts_or_none() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "len?"}]
    messages = [user("a") | {"content": parts}, {"role": "assistant", "content": None}]
    assert render(messages) == ("<|begin|><|user|>What is len?<|end|><|assistant|><|end|><|assistant|>")


def test_values_occur_in_their_requests() -> None:
    rng = random.Random(0)
    for maker in (tool_use.made_up_tool, tool_use.known_tool):
        for _ in range(200):
            tool, question = maker(rng)
            assert "{" not in question
            mentioned = [slot for slot in tool.parameters if slot.value not in (None, True)]
            assert [slot.name for slot in mentioned if str(slot.value) not in question] == []
