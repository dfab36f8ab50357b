"""The formats in which models write tool calls."""

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
    CallSyntax,
)


class ToolFormat(Struct, frozen=True):
    """A format of tool calls.

    It has the syntax of calls and the form of their ids.
    """

    syntax: CallSyntax
    reads_names: bool = False
    """True if a call that begins with the name of its function is parsed as well as one that is a JSON object."""
    id_prefix: str = "call_"
    id_chars: int = 24
    """Number of random letters and digits after the prefix in a call's id."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of which a call may have tokens."""
        return (*self.syntax.tags, ID_TAG, ARGUMENTS_TAG) if self.reads_names else self.syntax.tags


def _mistral(syntax: CallSyntax) -> ToolFormat:
    # Mistral's templates reject ids of any other length.
    return ToolFormat(syntax, reads_names=True, id_prefix="", id_chars=9)


FORMATS = {
    "hermes": ToolFormat(HERMES),
    "llama3_json": ToolFormat(LLAMA3_JSON),
    "mistral": _mistral(MISTRAL),
    "mistral_v11": _mistral(MISTRAL_WITH_IDS),
    "mistral_v13": _mistral(MISTRAL_NAMED),
    "json": ToolFormat(GENERIC_JSON),
}
"""Formats by name. Those of Mistral differ in what a grammar makes the model write; all of them are parsed alike."""

ALL_TAGS = (
    *THINK_TAGS.texts,
    *MISTRAL_THINK_TAGS.texts,
    *dict.fromkeys(tag for each in FORMATS.values() for tag in each.tags),
)
"""The tags of all formats of calls and reasoning."""

MODEL_FORMATS = {
    "llama": "llama3_json", "qwen2": "hermes", "qwen3": "hermes", "qwen3_moe": "hermes", "mistral": "mistral",
    "ministral3": "mistral", "gemma2": "json", "gemma3": "json", "gemma3_text": "json",
}  # fmt: skip
"""Name of the format by a checkpoint's `model_type`; "json" for any other type."""


def tool_format(name: str, model_types: Sequence[str], tags: Set[str], written: str | None = None) -> ToolFormat:
    """Return the format of this name.

    "auto" selects the format that the chat template has `written` calls in, or else that of the first known of the
    model's types. "mistral" selects the one of its variants that the template writes, or else that for which the
    vocabulary has tokens, of which `tags` are the texts.
    """
    if name == "auto":
        types = [MODEL_FORMATS[kind] for kind in model_types if kind in MODEL_FORMATS]
        name = written or (types[0] if types else "json")
    if name == "mistral" and (written is None or not written.startswith(name)) and ARGUMENTS_TAG in tags:
        return FORMATS["mistral_v11" if ID_TAG in tags else "mistral_v13"]
    return FORMATS[written if written is not None and written.startswith(name) else name]
