"""Tool call formats of models."""

from collections.abc import Sequence, Set

from msgspec import Struct

from tandem.frontend.grammar.grammar import MISTRAL_THINK_TAGS, THINK_TAGS
from tandem.frontend.grammar.tool_calls import (
    ARGUMENTS_TAG,
    GENERIC_JSON,
    HERMES,
    ID_TAG,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAMED,
    MISTRAL_WITH_IDS,
    QWEN3_CODER,
    CallSyntax,
)


class ToolFormat(Struct, frozen=True):
    """Tool call format: the syntax of calls and the form of their ids."""

    syntax: CallSyntax
    reads_names: bool = False
    """True if calls that begin with the function name are parsed, in addition to JSON objects."""
    id_prefix: str = "call_"
    id_chars: int = 24
    """Number of random letters and digits after the prefix of a call id."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags that may be single tokens in a call."""
        return (*self.syntax.tags, ID_TAG, ARGUMENTS_TAG) if self.reads_names else self.syntax.tags


def _mistral(syntax: CallSyntax) -> ToolFormat:
    # Mistral's templates reject ids of other lengths.
    return ToolFormat(syntax, reads_names=True, id_prefix="", id_chars=9)


FORMATS = {
    "hermes": ToolFormat(HERMES),
    "qwen3_coder": ToolFormat(QWEN3_CODER),
    "llama3_json": ToolFormat(LLAMA3_JSON),
    "mistral": _mistral(MISTRAL),
    "mistral_v11": _mistral(MISTRAL_WITH_IDS),
    "mistral_v13": _mistral(MISTRAL_NAMED),
    "json": ToolFormat(GENERIC_JSON),
}
"""Formats by name. The Mistral formats differ only in the grammar of calls; they are parsed alike."""

ALL_TAGS = (
    *THINK_TAGS.texts,
    *MISTRAL_THINK_TAGS.texts,
    *dict.fromkeys(tag for each in FORMATS.values() for tag in each.tags),
)
"""Tags of all tool call formats and reasoning."""

MODEL_FORMATS = {
    "llama": "llama3_json", "qwen2": "hermes", "qwen3": "hermes", "qwen3_moe": "hermes", "mistral": "mistral",
    "ministral3": "mistral", "gemma2": "json", "gemma3": "json", "gemma3_text": "json",
}  # fmt: skip
"""Format name by `model_type` of the checkpoint; the default is "json"."""


def tool_format_name(name: str, model_types: Sequence[str], tags: Set[str], written: str | None = None) -> str:
    """Return the key in FORMATS of the format `name`.

    "auto" selects `written`, the format that the chat template writes, or else the format of the first known model
    type. "mistral" selects the variant that the template writes, or else the one for which the vocabulary has tokens;
    `tags` are the texts of such tokens.
    """
    if name == "auto":
        types = [MODEL_FORMATS[kind] for kind in model_types if kind in MODEL_FORMATS]
        name = written or (types[0] if types else "json")
    if name == "mistral" and (written is None or not written.startswith(name)) and ARGUMENTS_TAG in tags:
        return "mistral_v11" if ID_TAG in tags else "mistral_v13"
    return written if written is not None and written.startswith(name) else name
