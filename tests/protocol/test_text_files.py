"""Encodings of text files that users write."""

import codecs

import pytest

from tandem.protocol.text_files import decode_text, without_bom


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"a", "a"),
        (b"a = 1\r\nb = 2\n", "a = 1\nb = 2\n"),
        (codecs.BOM_UTF8, ""),
        (codecs.BOM_UTF8 + "é".encode(), "é"),
        (codecs.BOM_UTF8 * 2 + b"a", "\ufeffa"),
    ],
)
def test_byte_order_mark_of_utf8_is_no_text(data: bytes, text: str) -> None:
    assert decode_text(data) == text


@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize(
    ("codec", "bom", "name"),
    [
        ("utf-16-le", codecs.BOM_UTF16_LE, "UTF-16"),
        ("utf-16-be", codecs.BOM_UTF16_BE, "UTF-16"),
        ("utf-32-le", codecs.BOM_UTF32_LE, "UTF-32"),
        ("utf-32-be", codecs.BOM_UTF32_BE, "UTF-32"),
    ],
)
def test_other_encodings_are_named(codec: str, bom: bytes, name: str, mark: bool) -> None:
    data = (bom if mark else b"") + '{"a": "é"}'.encode(codec)
    with pytest.raises(ValueError, match=name):
        without_bom(data)


def test_other_bytes_are_no_text() -> None:
    with pytest.raises(UnicodeDecodeError):
        decode_text(b"caf\xe9")
