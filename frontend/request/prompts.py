"""The field `prompt` of requests.

It is a string, or an array of strings, of token ids, or of token-id arrays. It may be as large as a body, so items are
counted before they are decoded, and decoded in slices, since the JSON decoder holds the GIL until it returns.
"""

from collections.abc import Iterator

from msgspec import Raw

from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.schema import ID, STRING, Schema, array
from tandem.frontend.request.values import decode_exact, decode_field, wrong_type

Prompt = str | list[int]

MAX_PROMPTS = 256
SLICE_BYTES = 64 * 1024

PROMPTS: Schema = {
    "anyOf": [
        STRING,
        array(STRING, MAX_PROMPTS, 1),
        {"type": "array", "items": ID, "minItems": 1},
        array({"type": "array", "items": ID}, MAX_PROMPTS, 1),
    ]
}

_SHAPES = "a string, an array of strings, of token ids, or of token-id arrays"
_NO_MIXTURE = f"{_SHAPES}, not a mixture"
_BLANK = b" \t\r\n"


def parse_prompts(raw: Raw, _: IgnoredFields) -> list[Prompt]:
    """Parse the prompts of a request, at least one.

    Raises ApiError 400 for other types, and for too many prompts.
    """
    data = bytes(memoryview(raw))
    if data.startswith(b'"'):
        return [decode_field(data, "prompt")]
    if not data.startswith(b"["):
        raise wrong_type("prompt", _SHAPES, {} if data.startswith(b"{") else decode_field(data, "prompt"))
    first = data[1 : 1 + SLICE_BYTES].lstrip(_BLANK)[:1]
    if first == b"]":
        raise malformed("{param} is an empty array; give at least one prompt or token id", "prompt")
    if first == b'"':
        return _texts(data)
    return [*_id_arrays(data)] if first == b"[" else [_ids(data)]


def _texts(data: bytes) -> list[Prompt]:
    # Each string has two quotes. Quotes after a backslash are text, or end a string that ends in a backslash.
    _check_count((data.count(b'"') - data.count(b'\\"')) // 2)
    texts: list[Prompt] = decode_exact(data, "prompt", list[str], _NO_MIXTURE)
    _check_count(len(texts))
    return texts


def _id_arrays(data: bytes) -> Iterator[list[int]]:
    """Yield the inner arrays of a JSON array.

    The outer array must contain only arrays of numbers.

    """
    _check_count(data.count(b"[") - 1)
    end = 1
    while (start := data.find(b"[", end)) >= 0:
        _check_blank(data[end:start])
        end = data.find(b"]", start) + 1
        yield _ids(data[start:end])
    _check_blank(data[end : len(data) - 1])


def _ids(data: bytes) -> list[int]:
    """Decode the numbers of an array in slices, each cut at a comma."""
    ids: list[int] = []
    start, end = 1, len(data) - 1
    while start < end:
        cut = data.find(b",", min(start + SLICE_BYTES, end), end)
        cut = end if cut < 0 else cut
        ids += decode_exact(b"[%b]" % data[start:cut], "prompt", list[int], _NO_MIXTURE)
        start = cut + 1
    return ids


def _check_blank(between: bytes) -> None:
    if between.strip(_BLANK + b","):
        raise _mixed()


def _mixed() -> ApiError:
    return malformed(f"{{param}} must be {_NO_MIXTURE}", "prompt")


def _check_count(count: int) -> None:
    if count > MAX_PROMPTS:
        raise unsupported(f"{{param}} takes at most {MAX_PROMPTS} prompts, not {count}", "prompt")
