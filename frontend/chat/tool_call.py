"""One call, a JSON object with a name and arguments, read character by character."""

from collections.abc import Set
from enum import Enum

import msgspec

from tandem.frontend.chat.message import BLANK

_OPENING, _CLOSING = "{[", "}]"


class JsonValue:
    """Follows one value from its first character on. What stands in it is not judged, only how it nests."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind")

    def __init__(self, first: str) -> None:
        self._in_string = first == '"'
        self._depth = int(first in _OPENING)
        self._kind = "string" if self._in_string else "container" if self._depth else "scalar"
        self._escaped = False

    def ends_before(self, character: str) -> bool:
        """Whether the value has ended and this character is not part of it: numbers and words end so."""
        return self._kind == "scalar" and (character in ",}]" or character in BLANK)

    def ends_with(self, character: str) -> bool:
        """Takes a character of the value; whether it is the last."""
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


class State(Enum):
    """How far a call has come."""

    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"


class _Expects(Enum):
    KEY_OR_END = 0
    KEY = 1
    IN_KEY = 2
    COLON = 3
    VALUE = 4
    IN_VALUE = 5
    NEXT = 6


class CallReader:
    """Takes what follows the opening brace of a call.

    `name` is set once the call is known to be one: it names a tool, and its arguments have begun or it is complete.
    From then on `take_arguments` yields their JSON as it comes, blanks and all. Arguments that the model wrote as a
    string of JSON come as that JSON, absent ones as an empty object. Objects with any other arguments are broken.
    `raw` is what was read until there was a name, the opening brace included.
    """

    def __init__(self, names: Set[str], argument_keys: Set[str]) -> None:
        self.state = State.OPEN
        self.name: str | None = None
        self.raw = ["{"]
        self._names = names
        self._argument_keys = argument_keys
        self._expects = _Expects.KEY_OR_END
        self._key = ""
        self._value = JsonValue('"')
        self._text: list[str] = []
        """Of the key or value that is being read."""
        self._found_name: str | None = None
        self._pending: list[str] = []
        self._has_arguments = False
        self._streams = False

    def take_arguments(self) -> str:
        """What there is of the arguments since the last time."""
        if self.name is None:
            return ""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def cut(self) -> None:
        """The text ends here, within what can only be a call: one of the tool that was named, if one was."""
        self._announce()

    def push(self, character: str) -> bool:
        """Takes a character; false where the call had broken before it, and the character is not part of it."""
        if self._expects is _Expects.IN_VALUE:
            self._in_value(character)
        elif self._expects is _Expects.IN_KEY:
            self._in_key(character)
        elif character not in BLANK:
            self._between(character)
        if self.state is State.BROKEN:
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
                self.state = State.BROKEN

    def _in_key(self, character: str) -> None:
        self._text.append(character)
        if self._value.ends_with(character):
            key = _decoded("".join(self._text))
            self._key = key if isinstance(key, str) else ""
            self._expects = _Expects.COLON

    def _begin_value(self, character: str) -> None:
        self._text, self._value, self._expects = [character], JsonValue(character), _Expects.IN_VALUE
        self._streams = False
        if self._key not in self._argument_keys:
            return
        if self._has_arguments or character not in '{"n':
            self.state = State.BROKEN
        elif character == "{":
            self._streams = self._has_arguments = True
            self._pending.append(character)
            self._announce()

    def _in_value(self, character: str) -> None:
        if self._value.ends_before(character):
            self._end_value()
            if self.state is State.OPEN and character not in BLANK:
                self._between(character)
            return
        (self._pending if self._streams else self._text).append(character)
        if self._value.ends_with(character):
            self._end_value()

    def _end_value(self) -> None:
        self._expects = _Expects.NEXT
        text = "".join(self._text)
        if self._key == "name":
            name = _decoded(text)
            if self._found_name is not None or not isinstance(name, str) or name not in self._names:
                self.state = State.BROKEN
                return
            self._found_name = name
            if self._has_arguments:
                self._announce()
        elif self._key in self._argument_keys and not self._streams:
            self._end_other_arguments(text)

    def _end_other_arguments(self, text: str) -> None:
        """Of arguments that are no object: a string with the JSON of one, or null."""
        value = _decoded(text)
        if isinstance(value, str) and isinstance(_decoded(value), dict):
            self._pending.append(value)
            self._has_arguments = True
            self._announce()
        elif value is not None or text != "null":
            self.state = State.BROKEN

    def _end(self) -> None:
        if self._found_name is None:
            self.state = State.BROKEN
            return
        if not self._has_arguments:
            self._pending.append("{}")
        self.state = State.DONE
        self._announce()

    def _announce(self) -> None:
        if self._found_name is not None:
            self.name = self._found_name


def _decoded(text: str) -> object:
    """The value of a JSON text, or None."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
