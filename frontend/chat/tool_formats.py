"""In which form which model writes its calls."""

from msgspec import Struct

from tandem.frontend.grammar.tool_calls import GENERIC_JSON, HERMES, LLAMA3_JSON, MISTRAL, CallSyntax


class ToolFormat(Struct, frozen=True):
    """How calls are written, and what else it takes to read them."""

    syntax: CallSyntax
    special_tokens: bool = False
    """Whether a special token announces calls, so that the text has to be decoded with them."""
    id_prefix: str = "call_"
    id_chars: int = 24
    """Letters and digits of a call's id behind its prefix."""


FORMATS = {
    "hermes": ToolFormat(HERMES),
    "llama3_json": ToolFormat(LLAMA3_JSON),
    # Its templates refuse ids of any other length.
    "mistral": ToolFormat(MISTRAL, special_tokens=True, id_prefix="", id_chars=9),
    "json": ToolFormat(GENERIC_JSON),
}

MODEL_FORMATS = {
    "llama": "llama3_json", "qwen2": "hermes", "qwen3": "hermes", "qwen3_moe": "hermes", "mistral": "mistral",
    "gemma3": "json", "gemma3_text": "json",
}  # fmt: skip
"""The format by a checkpoint's `model_type`; "json" for any other."""


def tool_format(name: str, model_type: str) -> ToolFormat:
    """The format of this name, or with "auto" that of the model."""
    return FORMATS[MODEL_FORMATS.get(model_type, "json") if name == "auto" else name]
