"""Rewrite character classes of regular expressions for strings of JSON.

The compiler rewrites a pattern so that it matches the JSON form of a string. Of a class that has all control
characters, or all but the line break, it takes the escapes of quote and backslash for allowed as well, whether they are
in the class or not (derivre 0.3, `json_quote`): `[^"]` would admit `\\"`. Without one of them, NUL, the class is exact.

In a class, `[`, `&&`, `--` and `~~` are ordinary characters for JSON Schema, but not for the compiler.
"""

import re

_PROPERTY = re.compile(r"\\[pP](\{[^}]*\}|.)")
_CLASS = re.compile(r"\[\^?\]?(\[:\^?[a-z]+:\]|\\.|[^\]\\])*\]", re.DOTALL)
_MAY_HAVE_CONTROLS = re.compile(r"\[\^|\\[pP]|\[:|\\x\{?00|\\u\{?00|\x00")
_ORDINARY = re.compile(r"\[:\^?[a-z]+:\]|\\.|\[|&&|--|~~", re.DOTALL)


def exact_classes(pattern: str) -> str:
    """Return a pattern without NUL in the classes that need it to be exact; other patterns are unchanged."""
    pieces: list[str] = []
    index = 0
    while index < len(pattern):
        found = None
        if pattern[index] == "[":
            found = _CLASS.match(pattern, index)
            if found is None:  # left open: an error, for the compiler to report
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
    """Escape what only the compiler reads as an operator of a class."""
    text = part[0]
    return text if len(text) > 2 or text[0] == "\\" else f"{text[:-1]}\\{text[-1]}"
