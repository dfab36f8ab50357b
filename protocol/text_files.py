"""Text files that users write: UTF-8, with or without a byte order mark.

Editors on Windows and PowerShell write one, and some write UTF-16.
"""

import codecs
import json


def without_bom(data: bytes) -> bytes:
    """Return the bytes of a UTF-8 text without its byte order mark.

    Raises ValueError for UTF-16 and UTF-32, which are detected by the first bytes of a file.
    """
    encoding = json.detect_encoding(data)
    if not encoding.startswith("utf-8"):
        raise ValueError(f"it is encoded in {encoding[:6].upper()}; save it as UTF-8")
    return data.removeprefix(codecs.BOM_UTF8)


def decode_text(data: bytes) -> str:
    """Decode a UTF-8 text, without its byte order mark and with `\\n` for `\\r\\n`.

    Raises ValueError for any other encoding.
    """
    return without_bom(data).decode("utf-8").replace("\r\n", "\n")
