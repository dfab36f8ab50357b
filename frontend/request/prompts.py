"""The field `prompt`: a string, an array of strings, of token ids, or of token-id arrays.

It may be as large as a body, so it is counted before it is built and built in slices: a call into the JSON decoder
keeps every other thread of the process waiting until it returns.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Raw

from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.request.fields import decode_field

Prompt = str | list[int]

MAX_PROMPTS = 256
SLICE_BYTES = 64 * 1024

_SHAPES = "a string, an array of strings, of token ids, or of token-id arrays"
_BLANK = b" \t\r\n"
_TYPE_NAMES = {b"{": "an object", b"t": "a boolean", b"f": "a boolean"}


def parse_prompts(raw: Raw | None) -> list[Prompt]:
    """The prompts, at least one. Raises ApiError 400 for another shape, 422 for too many."""
    data = b"" if raw is None else bytes(memoryview(raw))
    if data in (b"", b"null"):
        raise malformed("the field 'prompt' is required", "prompt")
    if data.startswith(b'"'):
        return [decode_field(data, "prompt", str)]
    if not data.startswith(b"["):
        raise malformed(f"'prompt' must be {_SHAPES}, not {_TYPE_NAMES.get(data[:1], 'a number')}", "prompt")
    first = data[1 : 1 + SLICE_BYTES].lstrip(_BLANK)[:1]
    if first == b"]":
        raise malformed("'prompt' is an empty array; give at least one prompt or token id", "prompt")
    try:
        if first == b'"':
            return _texts(data)
        return [*_id_arrays(data)] if first == b"[" else [_ids(data)]
    except msgspec.ValidationError as error:
        # The place that it names is one within a slice.
        raise malformed(f"'prompt' must be {_SHAPES}: {str(error).partition(' - at')[0]}", "prompt") from None


def _texts(data: bytes) -> list[Prompt]:
    # Each string has two quotes. Those behind a backslash are text, or the end of a string that ends in one.
    _check_count((data.count(b'"') - data.count(b'\\"')) // 2)
    texts: list[Prompt] = decode_field(data, "prompt", list[str])
    _check_count(len(texts))
    return texts


def _id_arrays(data: bytes) -> Iterator[list[int]]:
    """The inner arrays of valid JSON that has nothing but arrays of numbers in an array, or it is refused."""
    _check_count(data.count(b"[") - 1)
    end = 1
    while (start := data.find(b"[", end)) >= 0:
        _check_blank(data[end:start])
        end = data.find(b"]", start) + 1
        yield _ids(data[start:end])
    _check_blank(data[end : len(data) - 1])


def _ids(data: bytes) -> list[int]:
    """The numbers of one array, slice by slice: in valid JSON without strings and arrays a comma parts two of them."""
    ids: list[int] = []
    start, end = 1, len(data) - 1
    while start < end:
        cut = data.find(b",", min(start + SLICE_BYTES, end), end)
        cut = end if cut < 0 else cut
        ids += decode_field(b"[%b]" % data[start:cut], "prompt", list[int])
        start = cut + 1
    return ids


def _check_blank(between: bytes) -> None:
    if between.strip(_BLANK + b","):
        raise _mixed()


def _mixed() -> ApiError:
    return malformed(f"'prompt' must be {_SHAPES}, not a mixture", "prompt")


def _check_count(count: int) -> None:
    if count > MAX_PROMPTS:
        raise unsupported(f"'prompt' takes at most {MAX_PROMPTS} prompts, not {count}", "prompt")
