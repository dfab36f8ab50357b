"""A model with reasoning tags as special tokens, and the answers of its fake engine."""

from pathlib import Path
from typing import Any

from msgspec import structs

from tandem.frontend.config import FrontendConfig
from tests.fakes.tokenizer import byte_level_tokenizer

RAW = byte_level_tokenizer(with_begin=True)
RAW.add_tokens(["<think>", "</think>"])


def encode(text: str) -> list[int]:
    ids: list[int] = RAW.encode(text, add_special_tokens=False).ids
    return ids


def answer_with(text: str) -> Any:
    """Make an engine script that answers every prompt with this text."""
    return lambda submit: encode(text)[: submit.sampling.max_tokens]


def write_reasoning_model(folder: Path, template: str) -> Path:
    RAW.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def with_reasoning(config: FrontendConfig) -> FrontendConfig:
    return structs.replace(config, chat=structs.replace(config.chat, reasoning_parser="think"))
