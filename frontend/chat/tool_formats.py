"""The formats in which models write tool calls."""

from msgspec import Struct

from tandem.frontend.grammar.tool_calls import GENERIC_JSON, HERMES, LLAMA3_JSON, MISTRAL, CallSyntax


class ToolFormat(Struct, frozen=True):
    """A format of tool calls.

    It has the syntax of calls, the decoding of the output and the ids of calls.
    """

    syntax: CallSyntax
    special_tokens: bool = False
    """True if a special token announces calls, so that the output must be decoded with special tokens."""
    id_prefix: str = "call_"
    id_chars: int = 24
    """Number of random letters and digits after the prefix in a call's id."""


FORMATS = {
    "hermes": ToolFormat(HERMES),
    "llama3_json": ToolFormat(LLAMA3_JSON),
    # Mistral's templates reject ids of any other length.
    "mistral": ToolFormat(MISTRAL, special_tokens=True, id_prefix="", id_chars=9),
    "json": ToolFormat(GENERIC_JSON),
}

MODEL_FORMATS = {
    "llama": "llama3_json", "qwen2": "hermes", "qwen3": "hermes", "qwen3_moe": "hermes", "mistral": "mistral",
    "gemma2": "json", "gemma3": "json", "gemma3_text": "json",
}  # fmt: skip
"""Name of the format by a checkpoint's `model_type`; "json" for any other type."""


def tool_format(name: str, model_type: str) -> ToolFormat:
    """Return the format of this name; "auto" selects that of the model's type."""
    return FORMATS[MODEL_FORMATS.get(model_type, "json") if name == "auto" else name]
