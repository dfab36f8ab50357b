"""Servers whose fake engine is told what to say, in front of a model that can chat."""

from pathlib import Path

import tokenizers

from tandem.protocol.codec import unpack_ids
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import byte_level_tokenizer, write_chat_template, write_tokenizer

RAW: tokenizers.Tokenizer = byte_level_tokenizer()


def write_chat_model(folder: Path) -> Path:
    write_tokenizer(folder)
    write_chat_template(folder)
    return folder


def say(engine: FakeEngine, text: str) -> None:
    """Whatever the prompt."""
    engine.script = lambda submit: RAW.encode(text).ids[: submit.sampling.max_tokens]


def prompts(engine: FakeEngine) -> list[str]:
    """What it was asked, as text."""
    return [RAW.decode(list(unpack_ids(submit.prompt_ids))) for submit in engine.submits]
