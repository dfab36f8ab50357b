"""The field `prediction` of chats: text that the answer probably repeats."""

from typing import Literal

from msgspec import Raw, Struct

from tandem.frontend.errors import unsupported
from tandem.frontend.request.field_types import Parsed, sized
from tandem.frontend.request.fields import Field
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.messages import MAX_PARTS
from tandem.frontend.request.schema import STRING, array, nullable, of_type, opened
from tandem.frontend.request.values import TypedDecoder

MAX_PREDICTION_BYTES = 1024 * 1024
"""Maximum bytes of JSON of a prediction, enough for a file that is edited."""


class _Text(Struct):
    type: Literal["text"]  # A tag could be left out.
    text: str


class _Prediction(Struct):
    type: Literal["content"]
    content: str | list[_Text]


_DECODER = TypedDecoder(_Prediction)
_CONTENT = {"anyOf": [STRING, array(of_type(_Text), MAX_PARTS, 1)]}


def _read(raw: Raw, ignored: IgnoredFields) -> str:
    """Parse the text of a prediction; the parts of an array follow one another."""
    given: _Prediction = _DECODER.read(sized("prediction", raw, MAX_PREDICTION_BYTES), "prediction", ignored)
    if isinstance(given.content, str):
        return given.content
    if not 1 <= (count := len(given.content)) <= MAX_PARTS:
        raise unsupported(f"{{param}} takes 1 to {MAX_PARTS} parts, not {count}", "prediction.content")
    return "".join([part.text for part in given.content])


PREDICTION_FIELD = Field(
    "prediction",
    Parsed(_read, nullable(opened({"type": {"const": "content"}, "content": _CONTENT}))),
    "Text that the answer probably repeats: drafts are taken from it. Ignored without `--speculate ngram`.",
)
