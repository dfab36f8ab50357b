"""Rewrite character classes of regular expressions for strings of JSON.

The compiler rewrites a pattern so that it matches the JSON form of a string. Of a class that has all control
characters, or all but the line break, it takes the escapes of quote and backslash for allowed as well, whether they are
in the class or not (derivre 0.3, `json_quote`): `[^"]` would admit `\\"`. Without one of them, NUL, the class is exact.
"""

import re

_CONTROLS = [chr(code) for code in range(32)]
_ESCAPED = '"\\'
_PROPERTY = re.compile(r"\\[pP](\{[^}]*\}|.)")


def exact_classes(pattern: str) -> str:
    """Return a pattern without NUL in the classes that need it to be exact; other patterns are unchanged."""
    pieces: list[str] = []
    index = 0
    while index < len(pattern):
        end = _class_end(pattern, index)
        piece = pattern[index:end]
        if pattern[index] == "[" and end > index + 1:
            piece = f"[{piece}&&[^\\x00]]" if _needs_nul_removed(piece) else piece
        elif _PROPERTY.fullmatch(piece):
            piece = f"[{piece}&&[^\\x00]]"
        pieces.append(piece)
        index = end
    return "".join(pieces)


def _class_end(pattern: str, start: int) -> int:
    """Return the index after the class, escape or character at `start`."""
    if pattern[start] == "\\":
        found = _PROPERTY.match(pattern, start)
        return found.end() if found else min(start + 2, len(pattern))
    if pattern[start] != "[":
        return start + 1
    index, depth = start + 1, 1
    if pattern.startswith("^", index):
        index += 1
    if pattern.startswith("]", index):  # an ordinary character where it comes first
        index += 1
    while index < len(pattern):
        if pattern[index] == "\\":
            index += 1
        elif pattern[index] == "[":
            depth += 1
        elif pattern[index] == "]":
            depth -= 1
            if not depth:
                return index + 1
        index += 1
    return start + 1


def _needs_nul_removed(written: str) -> bool:
    """Tell whether a class has all control characters but not both quote and backslash.

    One that Python does not read is taken for such a class.
    """
    try:
        matches = re.compile(written).fullmatch
    except (re.error, OverflowError):
        return True
    if "[" in written[1:] or "&&" in written or "--" in written:
        return True  # operations on sets, which Python would read as characters
    if any(matches(character) is None for character in _CONTROLS if character != "\n"):
        return False
    return any(matches(character) is None for character in _ESCAPED)
