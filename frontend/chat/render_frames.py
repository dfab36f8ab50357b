"""Frames between a frontend and the process that renders its chat templates.

A frame is its length in four bytes, its kind in one, and that many bytes of text in UTF-8. To the process go the JSON
of `Templates` once, then that of one `RenderRequest` for each conversation; back come `READY` once, then `PROMPT` or
`FAILURE` for each request, in their order.
"""

from struct import Struct as Layout
from typing import Any

import msgspec
from msgspec import Struct

HEADER = Layout(">IB")
"""Length and kind."""
REQUEST, READY, PROMPT, FAILURE = range(4)
MEMORY_BYTES = 2 * 2**30
"""Address space of the process: a body of 32 MiB that becomes a prompt of the greatest size takes less than half."""
OUT_OF_MEMORY = 3
"""Exit code of a process that ran out of memory and could not answer."""


class Templates(Struct, frozen=True, array_like=True):
    """Templates of a model, with the special tokens that they may write."""

    texts: dict[str, str]
    """Source by the template's name."""
    special_tokens: dict[str, str]
    """Texts of the model's special tokens by their names in templates."""


class RenderRequest(Struct, frozen=True, array_like=True):
    """One conversation to be rendered."""

    template: str
    """Name of the template."""
    variables: dict[str, Any]
    """Variables of the template beside the special tokens."""


def frame(kind: int, text: bytes) -> bytes:
    """Encode a frame."""
    return HEADER.pack(len(text), kind) + text


def json_frame(value: Templates | RenderRequest) -> bytes:
    """Encode a frame for the process.

    Raises RecursionError for a value that is nested too deeply, UnicodeEncodeError for text with half a surrogate pair.
    """
    return frame(REQUEST, msgspec.json.encode(value))
