"""Encode and decode `encrypted_content`, the form of reasoning that clients send back unread.

OpenAI encrypts it. Here the reasoning is plain text in `content` anyway, and `encrypted_content` is the same text in
base64, because some clients send back only that.
"""

import base64
import binascii

_PREFIX = "tandem-reasoning-1:"


def carried_reasoning(text: str) -> str:
    """Encode reasoning as the `encrypted_content` of its item."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def read_reasoning(carried: str | None) -> str:
    """Decode the `encrypted_content` of an item; return "" if another server wrote it."""
    if carried is None or not carried.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(carried.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
