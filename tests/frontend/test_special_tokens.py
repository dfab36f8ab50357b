"""Text of clients that looks like special tokens, alone and in the chat templates of several models."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models

from tandem.frontend.chat.chat_template import TEMPLATES, ChatTemplate
from tandem.frontend.chat.render_worker import Renderer
from tandem.frontend.chat.template_sandbox import SandboxedTemplates
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.tokenizer import Tokenizer, load_tokenizer
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.special_tokens import _SLICE_CHARS, SpecialTokenGuard
from tandem.protocol.model_folder import TemplateSource
from tests.fakes.tokenizer import BEGIN, END, byte_level_tokenizer

SPECIAL = {
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "mistral": ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "</s>"],
    "gemma3": ["<start_of_turn>", "<end_of_turn>", "<bos>", "☃"],
}
DEFAULT_MODEL = Path(__file__).parents[2] / "engine_core" / "default_model"


@cache
def loaded(name: str) -> tuple[Tokenizer, Tokenizer]:
    """Load the tokenizer of a model without and with the guard."""
    with TemporaryDirectory() as folder:
        path = DEFAULT_MODEL
        if name != "default":
            raw = byte_level_tokenizer(with_begin=True)
            raw.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL[name]])
            raw.add_tokens(["<think>", "</think>"])
            path = Path(folder)
            raw.save(str(path / "tokenizer.json"))
        return load_tokenizer(path, 1), load_tokenizer(path, 1, no_special_tokens_in_text=True)


def guard_of(tokenizer: Tokenizer) -> SpecialTokenGuard:
    assert tokenizer.guard is not None
    return tokenizer.guard


@cache
def template(name: str) -> ChatTemplate:
    text = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplate(TemplateSource({"default": text}, name), {"bos_token": BEGIN, "eos_token": END})


@cache
def renderer(chat: ChatTemplate) -> Renderer:
    return Renderer(chat.templates, SandboxedTemplates())


def rendered(chat: ChatTemplate, conversation: Conversation) -> str:
    return renderer(chat).render("default", chat.request("default", conversation, IgnoredFields()).variables)


def sealed(name: str, conversation: Conversation, chat: ChatTemplate) -> str:
    guard = guard_of(loaded(name)[1])
    parts = {field: guard.protect(getattr(conversation, field)) for field in ("messages", "tools")}
    return guard.seal(rendered(chat, Conversation(**parts)))


def texts(name: str) -> st.SearchStrategy[str]:
    """Build texts of special tokens, of their halves and of characters that templates trim."""
    special = sorted(guard_of(loaded(name)[1]).names)
    half = st.sampled_from(special).flatmap(
        lambda token: st.integers(0, len(token)).flatmap(lambda at: st.sampled_from([token[:at], token[at:]]))
    )
    word = st.sampled_from(["hi", " ", "\n", "<", "|>", "</think>", "<think>", "grüße 🙂"])
    return st.lists(st.one_of(st.sampled_from(special), half, word), max_size=6).map("".join)


NAMES = st.sampled_from([*SPECIAL, "default"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_text_becomes_a_special_token_and_others_keep_their_ids(data: st.DataObject) -> None:
    name = data.draw(NAMES)
    plain, guarded = loaded(name)
    text = data.draw(texts(name))
    guard = guard_of(guarded)
    ids = guarded._encode(text, True)
    special = set(plain.special_tokens().values())
    assert ids[: len(guarded.leading_ids)] == plain.leading_ids
    assert special.isdisjoint(ids[len(plain.leading_ids) :])
    assert plain.decode(ids[len(plain.leading_ids) :], False) == text
    assert guard.unmarked(guard.protect(text)) == text
    if special.isdisjoint(plain._encode(text, False)):
        assert ids == plain._encode(text, True)
    assert guarded._encode(guard.seal(text), False) == plain._encode(text, False)


def special_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    special = set(tokenizer.special_tokens().values())
    return [token_id for token_id in ids if token_id in special]


def conversation(system: str, user: str, name: str, result: str, key: str, described: str) -> Conversation:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name or "f", "arguments": {key: [result]}}}
    tool = {"name": name or "f", "description": described, "parameters": {"properties": {key: {"enum": [described]}}}}
    return Conversation(
        [
            {"role": "system", "content": "s" + system},
            {"role": "user", "content": user},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "tool_call_id": "abcdefghi", "content": result},
        ],
        ({"type": "function", "function": tool},),
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_special_tokens_of_a_chat_are_those_of_its_template(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*SPECIAL]))
    plain, guarded = loaded(name)
    hostile = conversation(*(data.draw(texts(name)) for _ in range(6)))
    harmless = sealed(name, conversation(*["x"] * 6), template(name))
    text = sealed(name, hostile, template(name))
    assert special_ids(plain, guarded._encode(text, False)) == special_ids(plain, guarded._encode(harmless, False))
    assert guard_of(guarded).unsealed(text) == rendered(template(name), hostile)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.text(st.sampled_from("ab <>|/[]\n🙂"), max_size=20), min_size=6, max_size=6))
def test_ordinary_chat_has_the_same_ids(data: st.DataObject, fields: list[str]) -> None:
    name = data.draw(st.sampled_from([*SPECIAL]))
    plain, guarded = loaded(name)
    chat = conversation(*fields)
    assert guarded._encode(sealed(name, chat, template(name)), False) == plain._encode(
        rendered(template(name), chat), False
    )


def inline(source: str) -> ChatTemplate:
    return ChatTemplate(TemplateSource({"default": source}, "test"), {})


@pytest.mark.parametrize(
    ("source", "contents"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["<|im_", "start|>"]),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["<", "|im_start|>"]),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", ["<| \n", " im_start|>"]),
        ("{% for m in messages %}{{ m.content | lower }}{% endfor %}", ["<|IM_START|>"]),
        ("{% for m in messages %}{{ m.content.replace('x', '') }}{% endfor %}", ["<|im_xstart|>"]),
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", ["|im_start|"]),
        ("{% for m in messages %}{{ m | tojson(ensure_ascii=True) }}{% endfor %}", ["<|im_start|>"]),
        ("{% for m in messages %}{% for key in m %}{{ key }}{{ m[key] }}{% endfor %}{% endfor %}", ["<|im_end|>"]),
    ],
)
def test_template_that_joins_or_edits_texts_makes_no_special_token(source: str, contents: list[str]) -> None:
    plain, guarded = loaded("qwen3")
    chat = Conversation([{"role": "user", "content": content} for content in contents])
    text = sealed("qwen3", chat, inline(source))
    assert special_ids(plain, guarded._encode(text, False)) == []
    assert guard_of(guarded).unsealed(text) == rendered(inline(source), chat)
    assert special_ids(plain, plain._encode(rendered(inline(source), chat), False))


def test_texts_that_a_template_cuts_make_no_special_token() -> None:
    plain, guarded = loaded("qwen3")
    chat = Conversation([{"role": "user", "content": content} for content in ("<|im_sxx", "tart|>")])
    cutting = inline("{% for m in messages %}{{ m.content[:6] }}{% endfor %}")
    assert special_ids(plain, guarded._encode(sealed("qwen3", chat, cutting), False)) == []
    assert rendered(cutting, chat) == "<|im_start|>"


def test_token_of_a_turn_counts_although_it_is_not_marked_special(tmp_path: Path) -> None:
    raw = byte_level_tokenizer()
    raw.add_tokens(["<\uff5cUser\uff5c>", "<think>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, 1, no_special_tokens_in_text=True)
    assert set(guard_of(tokenizer).names) == {BEGIN, END, "<\uff5cUser\uff5c>"}
    assert raw.token_to_id("<think>") in tokenizer._encode("<think>", False)


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"<unk>": 0, "<s>": 1, "hi": 2}, unk_token="<unk>"),
        models.Unigram([("<unk>", 0.0), ("<s>", -1.0), ("hi", -2.0)], unk_id=0),
        models.BPE({"<unk>": 0, "<s>": 1, "hi": 2, "h": 3, "i": 4, "<": 5, "s": 6, ">": 7, "<s": 8},
                   [("h", "i"), ("<", "s"), ("<s", ">")], unk_token="<unk>"),
    ],
    ids=["WordLevel", "Unigram", "BPE"],
)  # fmt: skip
def test_the_vocabulary_itself_gives_no_special_token(model: models.Model, tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer(model)
    raw.add_special_tokens(["<s>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, 1, no_special_tokens_in_text=True)
    assert 1 not in tokenizer._encode("<s>", False)
    assert tokenizer._encode("hi", False) == [2]
    assert tokenizer._encode(guard_of(tokenizer).seal("<s>"), False) == [1]


@pytest.mark.parametrize("ids", [[40, 41], [0, 40], [0], []])
def test_prompt_of_ids_may_begin_as_the_tokenizer_begins_one(ids: list[int]) -> None:
    guarded = loaded("qwen3")[1]
    guard_of(guarded).check_ids(ids, guarded.leading_ids, "prompt")


@pytest.mark.parametrize(("ids", "at"), [([0, 0, 40], 1), ([40, 0], 1), ([1], 0), ([0, *[40] * 5000, 1], 5001)])
def test_prompt_of_ids_with_a_special_token_is_refused_by_name(ids: list[int], at: int) -> None:
    guarded = loaded("qwen3")[1]
    token: Any = (BEGIN, END)[ids[at]]
    with pytest.raises(ApiError, match="index") as caught:
        guard_of(guarded).check_ids(ids, guarded.leading_ids, "prompt")
    assert caught.value.status == 400
    assert f"token id {ids[at]} at index {at} " in str(caught.value)
    assert token in str(caught.value)


@pytest.mark.parametrize("before", range(_SLICE_CHARS - 10, _SLICE_CHARS + 2))
def test_token_across_two_slices_of_a_long_text_is_broken_up(before: int) -> None:
    guard = SpecialTokenGuard({"<|im_start|>": 1})
    protected = guard.protect("a" * before + "<|im_start|>" + "b" * 3)
    assert "<|im_start|>" not in protected
    assert guard.seal(protected) == "a" * before + "<|im_start|>" + "b" * 3
