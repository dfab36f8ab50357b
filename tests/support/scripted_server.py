"""Servers of a chat model whose fake engine answers from a script."""

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
    """Make the engine answer every prompt with this text."""
    engine.script = lambda submit: RAW.encode(text).ids[: submit.sampling.max_tokens]


def prompts(engine: FakeEngine) -> list[str]:
    """Return the prompts that the engine received, as text."""
    return [RAW.decode(list(unpack_ids(submit.prompt_ids))) for submit in engine.submits]
