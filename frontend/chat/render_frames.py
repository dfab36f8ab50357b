"""Frames between a frontend and its template process.

A frame is its length in four bytes, its type in one, and that many bytes of UTF-8 text. The frontend sends the JSON of
`Templates` once, then a `RenderRequest` for each conversation; the process replies with `READY` once, then `PROMPT` or
`FAILURE` for each request, in order.
"""

from struct import Struct as Layout
from typing import Any

import msgspec
from msgspec import Struct

HEADER = Layout(">IB")
"""Length and type."""
REQUEST, READY, PROMPT, FAILURE = range(4)
MEMORY_BYTES = 2 * 2**30
"""Address space of the process: a body of 32 MiB that becomes a prompt of the maximum size takes less than half."""
OUT_OF_MEMORY = 3
"""Exit code of a process that ran out of memory and could not reply."""


class Templates(Struct, frozen=True, array_like=True):
    """Templates of a model, with the special tokens that they may use."""

    texts: dict[str, str]
    """Source by template name."""
    special_tokens: dict[str, str]
    """Special tokens by their names in templates."""


class RenderRequest(Struct, frozen=True, array_like=True):
    """Conversation to render."""

    template: str
    """Name of the template."""
    variables: dict[str, Any]
    """Variables of the template besides the special tokens."""


def frame(kind: int, text: bytes) -> bytes:
    """Encode a frame."""
    return HEADER.pack(len(text), kind) + text


def json_frame(value: Templates | RenderRequest) -> bytes:
    """Encode a frame for the process.

    Raises RecursionError for a value that is nested too deeply, UnicodeEncodeError for text with a lone surrogate.
    """
    return frame(REQUEST, msgspec.json.encode(value))
