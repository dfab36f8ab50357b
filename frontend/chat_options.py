"""The flags that say how a server chats with its model."""

import argparse
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

DEFAULT_MAX_TOKENS = 1024

CHAT_FLAGS = ("default_max_tokens", "chat_template", "tool_parser", "reasoning_parser")
"""What a supervisor passes on."""

ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "json"]
ReasoningParserName = Literal["auto", "think", "none"]


class ChatOptions(Struct, frozen=True):
    """`auto` goes by the model."""

    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """Of a chat that does not say; less where the model has less room."""
    template: Path | None = None
    """A file, instead of the checkpoint's template."""
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="jinja template; default: the checkpoint's own, else ours"
    )
    group.add_argument(
        "--default-max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        help=f"most tokens of an answer to a chat that does not say (default {DEFAULT_MAX_TOKENS})",
    )
    group.add_argument(
        "--tool-parser",
        choices=get_args(ToolParserName),
        default="auto",
        help="the form in which the model writes calls of tools (default: by its type)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=get_args(ReasoningParserName),
        default="auto",
        help="whether <think>...</think> may open an answer (default: if the chat template knows </think>)",
    )


def chat_options(arguments: argparse.Namespace) -> ChatOptions:
    return ChatOptions(
        arguments.default_max_tokens, arguments.chat_template, arguments.tool_parser, arguments.reasoning_parser
    )
