"""Rewrite character classes of regexes for JSON strings.

The compiler converts a pattern to match the JSON encoding of a string. If a class contains all control characters (or
all but the line break), it also allows the escapes of quote and backslash, even if the class excludes them (derivre
0.3, `json_quote`): `[^"]` would match `\\"`. Removing a control character, NUL, makes the class exact.

In a class, `[`, `&&`, `--` and `~~` are ordinary characters in JSON Schema, but operators for the compiler.
"""

import re

_PROPERTY = re.compile(r"\\[pP](\{[^}]*\}|.)")
_CLASS = re.compile(r"\[\^?\]?(\[:\^?[a-z]+:\]|\\.|[^\]\\])*\]", re.DOTALL)
_MAY_HAVE_CONTROLS = re.compile(r"\[\^|\\[pP]|\[:|\\x\{?00|\\u\{?00|\x00")
_ORDINARY = re.compile(r"\[:\^?[a-z]+:\]|\\.|\[|&&|--|~~", re.DOTALL)


def exact_classes(pattern: str) -> str:
    """Remove NUL from the classes of a pattern that would not be exact with it."""
    pieces: list[str] = []
    index = 0
    while index < len(pattern):
        found = None
        if pattern[index] == "[":
            found = _CLASS.match(pattern, index)
            if found is None:  # unterminated: the compiler reports the error
                return pattern
            piece = "[" + _ORDINARY.sub(_escaped, found[0][1:])
            piece = f"[{piece}&&[^\\x00]]" if _MAY_HAVE_CONTROLS.search(piece) else piece
        elif found := _PROPERTY.match(pattern, index):
            piece = f"[{found[0]}&&[^\\x00]]"
        else:
            piece = pattern[index : index + 1 + (pattern[index] == "\\")]
        pieces.append(piece)
        index = found.end() if found else index + len(piece)
    return "".join(pieces)


def _escaped(part: re.Match[str]) -> str:
    """Escape the operators of the compiler that are ordinary characters in JSON Schema."""
    text = part[0]
    return text if len(text) > 2 or text[0] == "\\" else f"{text[:-1]}\\{text[-1]}"
