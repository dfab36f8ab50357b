"""Where a JSON value ends, found character by character and without building it."""

from tandem.frontend.chat.held_text import BLANK

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
