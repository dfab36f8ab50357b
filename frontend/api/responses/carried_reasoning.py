"""Reasoning in the form that clients carry from turn to turn without reading it.

OpenAI's `encrypted_content` is a secret of the server. Here the reasoning is plain text in `content` anyway, and
`encrypted_content` is the same text, encoded: some clients send back only that.
"""

import base64
import binascii

_PREFIX = "tandem-reasoning-1:"


def carried_reasoning(text: str) -> str:
    """Encode reasoning as the `encrypted_content` of its item."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def read_reasoning(carried: str | None) -> str:
    """Decode the `encrypted_content` of an item; empty for that of another server."""
    if carried is None or not carried.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(carried.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
