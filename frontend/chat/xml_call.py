"""Parse one tool call written as XML, as Qwen3-Coder and Qwen3.5 write it, character by character.

The call is `<function=NAME>`, a `<parameter=NAME>` with its value for each argument, and `</function>`. Its arguments
are returned as JSON, with the types of the tool's schema. Values are not escaped: one ends at a `</parameter>` that
the next tag follows, or at the end of the whole call if the model left that tag out.
"""

from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

import msgspec

from tandem.frontend.chat.tool_call import CallState, decoded
from tandem.frontend.generation.output_tags import BLANK, MAX_BLANKS
from tandem.frontend.grammar.parameter_types import parameter_types
from tandem.frontend.request.tools import MAX_NAME_CHARS

FUNCTION = "<function="
"""Text with which a call begins."""
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_FUNCTION_END, _CALL_END = _ENDS = ("</function>", "</tool_call>")
"""Tags after which a call has no more parameters; models leave out the first one at times."""
_STRING = frozenset(("string",))


class _Within(Enum):
    HEADER = "header"
    FIRST_TAG = "first tag"
    """State between the name of the function and its first parameter or its end."""
    VALUE = "value"


class XmlCallParser:
    """Parse a call from its `<function=` on.

    As with `CallParser`, `name` is set once it is known that this is a call of a tool, here by the tag after the name,
    and `raw` holds the characters before it. From then on nothing is invalid. The text of a string is returned as it
    arrives, other values when they are complete. `schemas` are those of the tools' arguments.
    """

    id = ""

    def __init__(self, names: Set[str], schemas: Mapping[str, dict[str, Any] | None]) -> None:
        self.state = CallState.OPEN
        self.name: str | None = None
        self.raw: list[str] = []
        self._names = names
        self._schemas = schemas
        self._within = _Within.HEADER
        self._function = ""
        """Name of the function, once its tag is complete."""
        self._held = ""
        """Text of a tag, or of what may become the end of a value."""
        self._at_start = False
        """True before the first character of a value."""
        self._types: frozenset[str] | None = None
        """Types that the schema admits for the current parameter; None for any type."""
        self._value: list[str] = []
        """Text of the value, in parts; without what has been returned of a string."""
        self._num_arguments = 0
        self._pending: list[str] = []

    def takes_tag(self, tag: str) -> bool:
        """Return True if a tag that follows is text of the call."""
        if self._within is _Within.FIRST_TAG:
            return _may_follow(self._held + tag)
        return self._within is _Within.VALUE

    def take_arguments(self) -> str:
        """Return the arguments' JSON that arrived since the last call."""
        if self.name is None:
            return ""
        if self._types == _STRING:
            self._take_string()
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def cut(self) -> None:
        """End the text within what must be a call; set `name` if it was read."""
        self.name = self._function or None

    def push(self, character: str) -> bool:
        """Consume a character; return True if it belongs to the call.

        A character that makes the call invalid is not part of it.
        """
        match self._within:
            case _Within.HEADER:
                self._in_header(character)
            case _Within.FIRST_TAG:
                self._in_first_tag(character)
            case _Within.VALUE:
                self._in_value(character)
        if self.state is CallState.INVALID:
            return False
        if self.name is None:
            self.raw.append(character)
        return True

    def _in_header(self, character: str) -> None:
        self._held += character
        if not _is_name_tag(self._held, FUNCTION):
            self.state = CallState.INVALID
        elif character == ">":
            self._function, self._held = self._held[len(FUNCTION) : -1], ""
            self._within = _Within.FIRST_TAG
            if self._function not in self._names:
                self.state = CallState.INVALID

    def _in_first_tag(self, character: str) -> None:
        self._held += character
        if not _may_follow(self._held):
            self.state = CallState.INVALID
        elif character == ">":
            self.name = self._function
            self._pending.append("{")
            self._end_tag()

    def _in_value(self, character: str) -> None:
        if self._at_start:
            self._at_start = False
            if character == "\n":
                return
        if not self._held and character not in "\n<":
            self._value.append(character)
            return
        self._held += character
        while self._held and not _may_end_value(self._held):
            self._value.append(self._held[0])
            self._held = self._held[1:]
        if _ends_value(self._held):
            self._end_value()
            self._end_tag()

    def _take_string(self) -> None:
        """Move the text of a string to the arguments."""
        self._pending.append(_quoted("".join(self._value))[1:-1])
        self._value.clear()

    def _end_tag(self) -> None:
        """Read the complete tag at the end of the held text: a parameter begins, or the call is done."""
        tag, self._held = self._held[self._held.rindex("<") :], ""
        if tag in _ENDS:
            self._pending.append("}")
            self.state = CallState.DONE
            return
        name = tag[len(_PARAMETER) : -1]
        self._types = parameter_types(self._schemas.get(self._function), name)
        self._pending.append((", " if self._num_arguments else "") + _quoted(name) + ": ")
        self._num_arguments += 1
        self._within, self._at_start = _Within.VALUE, True
        if self._types == _STRING:
            self._pending.append('"')

    def _end_value(self) -> None:
        if self._types == _STRING:
            self._take_string()
            self._pending.append('"')
        else:
            self._pending.append(json_value("".join(self._value), self._types))
            self._value.clear()


def json_value(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of a parameter's value, which stays a string if it has none of the types.

    Without `types` any JSON is taken. Chat templates write Python's `True`, `False` and `None` in earlier calls, so
    models do as well.
    """
    stripped = text.strip()
    if types is None:
        return _quoted(text) if decoded(stripped) is None and stripped != "null" else stripped
    if "null" in types and stripped in ("null", "None"):
        return "null"
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower()
    value = decoded(stripped)
    match value:
        case bool():
            fits = False
        case int():
            fits = not types.isdisjoint(("integer", "number"))
        case float():
            fits = "number" in types or ("integer" in types and value.is_integer())
        case list():
            fits = "array" in types
        case dict():
            fits = "object" in types
        case _:
            fits = False
    return stripped if fits else _quoted(text)


def _is_name_tag(text: str, opening: str) -> bool:
    """Return True if a text is the beginning of a tag with a name, or the whole of one."""
    if not text.startswith(opening):
        return opening.startswith(text)
    name = text[len(opening) :].removesuffix(">")
    return bool(name or text == opening) and len(name) <= MAX_NAME_CHARS and not {"<", ">", "\n"} & set(name)


def _may_follow(text: str) -> bool:
    """Return True if a text is the beginning of blanks and a tag between values, or the whole of them."""
    tag = text.lstrip(BLANK)
    if len(text) - len(tag) > MAX_BLANKS:
        return False
    return _is_name_tag(tag, _PARAMETER) or any(end.startswith(tag) for end in _ENDS)


def _may_end_value(text: str) -> bool:
    """Return True if a text is the beginning of the end of a value with the next tag, or the whole of it."""
    text = text.removeprefix("\n")
    if text.startswith(_PARAMETER_END):
        return _may_follow(text[len(_PARAMETER_END) :])
    if text.startswith(_FUNCTION_END):
        rest = text[len(_FUNCTION_END) :]
        return _CALL_END.startswith(rest.lstrip(BLANK)) and _may_follow(rest)
    return _PARAMETER_END.startswith(text) or _FUNCTION_END.startswith(text)


def _ends_value(text: str) -> bool:
    """Return True if a text that may end a value is complete."""
    text = text.removeprefix("\n")
    return text.endswith(">") and text not in (_PARAMETER_END, _FUNCTION_END)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
