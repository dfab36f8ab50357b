"""Safetensors files written byte by byte, whole and broken."""

import json
from pathlib import Path
from typing import Any


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """Describe a tensor as a header does."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file_bytes(header: bytes | dict[str, Any], data: int = 0, length: int | None = None) -> bytes:
    """Join a file from its header and `data` zero bytes; length: what it gives as the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def write(path: Path, header: bytes | dict[str, Any], data: int = 0, length: int | None = None) -> Path:
    """Write such a file and return its path."""
    path.write_bytes(file_bytes(header, data, length))
    return path
