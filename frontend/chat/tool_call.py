"""Parse one tool call, character by character.

A call is a JSON object with a name and arguments, or a name, a tag and a JSON object.
"""

from collections.abc import Set
from enum import Enum

import msgspec

from tandem.frontend.generation.output_tags import BLANK
from tandem.frontend.grammar.tool_calls import ARGUMENTS_TAG, ID_TAG
from tandem.frontend.request.tools import MAX_NAME_CHARS

_OPENING, _CLOSING = "{[", "}]"


class JsonValue:
    """Find the end of a JSON value that starts with `first`.

    Tracks nesting and strings; does not validate.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind")

    def __init__(self, first: str) -> None:
        self._in_string = first == '"'
        self._depth = int(first in _OPENING)
        self._kind = "string" if self._in_string else "container" if self._depth else "scalar"
        self._escaped = False

    @property
    def in_string(self) -> bool:
        """Return True within a string."""
        return self._in_string

    def ends_before(self, character: str) -> bool:
        """Return True if the value ended before this character, as numbers and literals do."""
        return self._kind == "scalar" and (character in ",}]" or character in BLANK)

    def ends_with(self, character: str) -> bool:
        """Consume a character of the value; return True if it is the last one."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if character == '"':
            self._in_string = True
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING:
            self._depth -= 1
            return self._depth == 0
        return False


class CallState(Enum):
    """Parsing state of a call."""

    OPEN = "open"
    DONE = "done"
    INVALID = "invalid"


class _Expects(Enum):
    KEY_OR_END = 0
    KEY = 1
    IN_KEY = 2
    COLON = 3
    VALUE = 4
    IN_VALUE = 5
    NEXT = 6


class CallParser:
    """Parse a call, starting after its opening brace.

    `name` is set once the object is known to be a call: it names a tool, and its arguments have started or it is
    complete. From then on `take_arguments` returns their JSON as it arrives, including whitespace. If the model wrote
    the arguments as a JSON string, its decoded content is returned; missing arguments become an empty object. Objects
    with any other arguments are invalid. `raw` holds the characters before the name was set, from the opening brace.
    """

    id = ""

    def __init__(self, names: Set[str], argument_keys: Set[str]) -> None:
        self.state = CallState.OPEN
        self.name: str | None = None
        self.raw = ["{"]
        self._names = names
        self._argument_keys = argument_keys
        self._expects = _Expects.KEY_OR_END
        self._key = ""
        self._value = JsonValue('"')
        self._text: list[str] = []
        """Characters of the current key or value."""
        self._parsed_name: str | None = None
        """Value of the key `name`, while the object may not be a call."""
        self._pending: list[str] = []
        self._has_arguments = False
        self._streams = False

    def take_arguments(self) -> str:
        """Return the arguments' JSON that arrived since the last call."""
        if self.name is None:
            return ""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def takes_tag(self, tag: str) -> bool:
        """Return True if a tag that follows is text of the call, as it is within a string."""
        return self._expects is _Expects.IN_KEY or (self._expects is _Expects.IN_VALUE and self._value.in_string)

    def cut(self) -> None:
        """Handle the end of the text within an object that must be a call; set `name` if it was read."""
        self._set_name()

    def push(self, character: str) -> bool:
        """Consume a character; return True if it belongs to the call.

        A character that makes the call invalid is not part of it.
        """
        if self._expects is _Expects.IN_VALUE:
            self._in_value(character)
        elif self._expects is _Expects.IN_KEY:
            self._in_key(character)
        elif character not in BLANK:
            self._between(character)
        if self.state is CallState.INVALID:
            return False
        if self.name is None:
            self.raw.append(character)
        return True

    def _between(self, character: str) -> None:
        match self._expects, character:
            case ((_Expects.KEY_OR_END | _Expects.KEY), '"'):
                self._text, self._value, self._expects = ['"'], JsonValue('"'), _Expects.IN_KEY
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.VALUE, _ if character not in ",:}]":
                self._begin_value(character)
            case _Expects.NEXT, ",":
                self._expects = _Expects.KEY
            case ((_Expects.NEXT | _Expects.KEY_OR_END), "}"):
                self._end()
            case _:
                self.state = CallState.INVALID

    def _in_key(self, character: str) -> None:
        self._text.append(character)
        if self._value.ends_with(character):
            key = decoded("".join(self._text))
            self._key = key if isinstance(key, str) else ""
            self._expects = _Expects.COLON

    def _begin_value(self, character: str) -> None:
        self._text, self._value, self._expects = [character], JsonValue(character), _Expects.IN_VALUE
        self._streams = False
        if self._key not in self._argument_keys:
            return
        if self._has_arguments or character not in '{"n':
            self.state = CallState.INVALID
        elif character == "{":
            self._streams = self._has_arguments = True
            self._pending.append(character)
            self._set_name()

    def _in_value(self, character: str) -> None:
        if self._value.ends_before(character):
            self._end_value()
            if self.state is CallState.OPEN and character not in BLANK:
                self._between(character)
            return
        (self._pending if self._streams else self._text).append(character)
        if self._value.ends_with(character):
            self._end_value()

    def _end_value(self) -> None:
        self._expects = _Expects.NEXT
        text = "".join(self._text)
        if self._key == "name":
            name = decoded(text)
            if self._parsed_name is not None or not isinstance(name, str) or name not in self._names:
                self.state = CallState.INVALID
                return
            self._parsed_name = name
            if self._has_arguments:
                self._set_name()
        elif self._key in self._argument_keys and not self._streams:
            self._end_other_arguments(text)

    def _end_other_arguments(self, text: str) -> None:
        """Read arguments that are not an object.

        They are a string that contains the JSON of an object, or null.
        """
        value = decoded(text)
        if isinstance(value, str) and isinstance(decoded(value), dict):
            self._pending.append(value)
            self._has_arguments = True
            self._set_name()
        elif value is not None or text != "null":
            self.state = CallState.INVALID

    def _end(self) -> None:
        if self._parsed_name is None:
            self.state = CallState.INVALID
            return
        if not self._has_arguments:
            self._pending.append("{}")
        self.state = CallState.DONE
        self._set_name()

    def _set_name(self) -> None:
        if self._parsed_name is not None:
            self.name = self._parsed_name


class NamedCallParser:
    """Parse a call that begins with the function name, `NAME[CALL_ID]ID[ARGS]{...}`.

    The tags and the id may be missing. As in `CallParser`, `name` is set once the text is known to be a call of a
    tool, here at the opening brace of the arguments, and `raw` holds the characters before it. `id` is the model's call
    id, or "".
    """

    def __init__(self, names: Set[str], id_tag: str = ID_TAG, arguments_tag: str = ARGUMENTS_TAG) -> None:
        self.state = CallState.OPEN
        self.name: str | None = None
        self.id = ""
        self.raw: list[str] = []
        self._names = names
        self._id_tag = id_tag
        self._arguments_tag = arguments_tag
        self._header = ""
        self._value: JsonValue | None = None
        """Parser of the arguments; None before they start."""
        self._pending: list[str] = []

    def takes_tag(self, tag: str) -> bool:
        """Return True if a tag that follows is text of the call, as it is within a string."""
        return self._may_begin(self._header + tag) if self._value is None else self._value.in_string

    def take_arguments(self) -> str:
        """Return the arguments' JSON that arrived since the last call."""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def cut(self) -> None:
        """Handle the end of the text within what must be a call; set `name` if a tag ended it."""
        name, tag, _ = self._header.partition("[")
        if tag and name in self._names:
            self.name = name

    def push(self, character: str) -> bool:
        """Consume a character; return True if it belongs to the call.

        A character that makes the call invalid is not part of it.
        """
        if self._value is not None:
            self._pending.append(character)
            if self._value.ends_with(character):
                self.state = CallState.DONE
        elif character == "{":
            name, tag, call_id = self._header.rstrip(BLANK).removesuffix(self._arguments_tag).partition(self._id_tag)
            if not _is_word(name) or name not in self._names or (tag and not _is_word(call_id)):
                self.state = CallState.INVALID
                return False
            self.name, self.id, self._value = name, call_id, JsonValue(character)
            self._pending.append(character)
        else:
            self._header += character
            if not self._may_begin(self._header):
                self.state = CallState.INVALID
                return False
            self.raw.append(character)
        return True

    def _may_begin(self, header: str) -> bool:
        """Return True if a text is a prefix of a valid header: what precedes the arguments of a call."""
        name = header.partition("[")[0]
        if not _is_word(name) or len(header) > _MAX_HEADER_CHARS:
            return False
        tags = header[len(name) :]
        if tags.startswith(self._id_tag):
            call_id = tags.removeprefix(self._id_tag).partition("[")[0]
            tags = tags[len(self._id_tag) + len(call_id) :]
            if call_id and not _is_word(call_id):
                return False
        elif self._id_tag.startswith(tags):
            return True
        return self._arguments_tag.startswith(tags) or (
            tags.startswith(self._arguments_tag) and not tags.removeprefix(self._arguments_tag).strip(BLANK)
        )


_MAX_HEADER_CHARS = 2 * MAX_NAME_CHARS
"""Maximum length of a header: function name, id and tags."""
_PUNCTUATION = str.maketrans("_.-:/", "aaaaa")


def _is_word(text: str) -> bool:
    return text.isascii() and text.translate(_PUNCTUATION).isalnum()


def decoded(text: str) -> object:
    """Decode JSON; return None if it is invalid."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
