"""Extract the input of a custom tool from the JSON arguments of the function that represents it."""

import re

import msgspec

from tandem.frontend.api.responses.tools import CUSTOM_ARGUMENT

_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_ARGUMENT}"\s*:\s*"')
_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
                         r'|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*')  # fmt: skip
"""Complete characters of a JSON string, excluding a truncated escape."""
_ESCAPES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)


class CustomInput:
    """Decode the string argument of one call while its JSON arrives.

    The result does not depend on how the JSON is split. For arguments of another form, `finish` returns the only
    string of the object, or else the raw arguments.
    """

    def __init__(self) -> None:
        self._json = ""
        self._read = 0
        """Number of JSON characters consumed; 0 before the string begins."""
        self._text: list[str] = []

    def push(self, fragment: str) -> str:
        """Append a fragment of the arguments and return the decoded text it completes."""
        self._json += fragment
        if not self._read:
            opening = _OPENING.match(self._json)
            if opening is None:
                return ""
            self._read = opening.end()
        return self._take()

    def finish(self) -> str:
        """Return the remaining text when the arguments have ended or were truncated."""
        if self._read:
            return ""
        text = _only_string(self._json)
        self._text.append(text)
        return text

    @property
    def text(self) -> str:
        """Return the input so far."""
        return "".join(self._text)

    def _take(self) -> str:
        characters = _CHARACTERS.match(self._json, self._read)
        assert characters is not None
        text = _ESCAPES.sub(_unescaped, characters[0])
        self._read = characters.end()
        self._text.append(text)
        return text


def _unescaped(escape: re.Match[str]) -> str:
    """Decode an escape; return it unchanged if JSON does not define it."""
    try:
        text: str = msgspec.json.decode(f'"{escape[0]}"', type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return escape[0]
    return text


def _only_string(arguments: str) -> str:
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments
    values = list(decoded.values()) if isinstance(decoded, dict) else [decoded]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
