"""The input of a custom tool, decoded while the arguments of its function arrive."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.api.responses.custom_input import CustomInput


def decoded(fragments: list[str]) -> tuple[str, str]:
    """Return the input, and the same in the pieces in which it was handed out."""
    reader = CustomInput()
    pieces = [reader.push(fragment) for fragment in fragments]
    pieces.append(reader.finish())
    return reader.text, "".join(pieces)


@given(st.text(), st.data(), st.booleans())
def test_input_is_decoded_however_its_json_is_split(text: str, data: st.DataObject, ascii_only: bool) -> None:
    written = msgspec.json.encode({"input": text}).decode()
    if ascii_only:
        written = "".join([c if c.isascii() else msgspec.json.decode(msgspec.json.encode(c)) for c in written])
        written = written.encode("ascii", "backslashreplace").decode() if written.isascii() else written
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=6)) | {0, len(written)})
    found, pieces = decoded([written[start:end] for start, end in itertools.pairwise(cuts)])
    assert found == pieces == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "a\\u00e9\\ud83d\\ude00\\n\\"b\\""}', 'a\u00e9\U0001f600\n"b"'),
        ('{ "input" :\n "x" }', "x"),
        ('{"patch": "x"}', "x"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('"x"', "x"),
        ("{}", "{}"),
        ("not json", "not json"),
        ('{"input": "cut \\', "cut "),
        ('{"input": "cut \\ud83d', "cut "),
        ('{"input": "raw\nline \\q"}', "raw\nline \\q"),
        ("", ""),
    ],
)
def test_input_of_any_form_is_returned(written: str, text: str) -> None:
    assert decoded([written]) == (text, text)
    assert decoded(list(written)) == (text, text)
