"""A folder like Gemma's: the template writes the begin token and the turns, the tokenizer a begin token of its own."""

import asyncio
import json
from pathlib import Path

import pytest

from tandem.frontend.chat.chat_template import load_chat_template
from tandem.frontend.generation.tokenizer import Tokenizer, load_tokenizer
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IgnoredFields
from tests.fakes.tokenizer import gemma_tokenizer
from tests.support.rendering import rendered

OWN = (
    "{{ bos_token }}{% for turn in messages %}"
    "{% if turn['role'] == 'system' %}{{ raise_exception('no turns of the system') }}{% endif %}"
    "<start_of_turn>{{ {'assistant': 'model'}.get(turn['role'], turn['role']) }}\n"
    "{{ turn['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""A template of turns like those that instruction-tuned checkpoints have in tokenizer_config.json."""
BOS, START, END_OF_TURN = 2, 4, 5
MESSAGES = ({"role": "user", "content": "join two paths?"},)


def folder_of(tmp_path: Path, model_type: str, template: str | None) -> Tokenizer:
    gemma_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    own = {} if template is None else {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", **own}))
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3", "gemma3_text"])
@pytest.mark.parametrize("template", [None, OWN], ids=["built-in", "own"])
def test_a_chat_begins_once_and_its_turns_are_single_tokens(
    model_type: str, template: str | None, tmp_path: Path
) -> None:
    tokenizer = folder_of(tmp_path, model_type, template)
    loaded = load_chat_template(tmp_path, None, tokenizer)
    assert loaded is not None
    prompt = rendered(loaded, Conversation(MESSAGES), IgnoredFields())
    assert prompt == "<bos><start_of_turn>user\njoin two paths?<end_of_turn>\n<start_of_turn>model\n"
    ids = asyncio.run(tokenizer.encode(prompt, add_special_tokens=False))
    assert ids[:2] == [BOS, START]
    assert [ids.count(token) for token in (BOS, START, END_OF_TURN)] == [1, 2, 1]


def test_the_prompt_of_a_completion_begins_once(tmp_path: Path) -> None:
    tokenizer = folder_of(tmp_path, "gemma3_text", None)
    ids = asyncio.run(tokenizer.encode("join two paths"))
    assert ids[0] == BOS
    assert BOS not in ids[1:]
    assert tokenizer.decode(ids) == "join two paths"


@pytest.mark.parametrize("text", ["join two", " one  path", "naïve 🙂 path\n", "ŵ"])
def test_an_answer_streams_as_its_text_without_the_end_of_its_turn(text: str, tmp_path: Path) -> None:
    tokenizer = folder_of(tmp_path, "gemma3", None)
    ids = [*asyncio.run(tokenizer.encode(text, add_special_tokens=False)), END_OF_TURN]
    stream = tokenizer.detokenizer()
    assert "".join([stream.push(token) for token in ids] + [stream.flush()]) == text
