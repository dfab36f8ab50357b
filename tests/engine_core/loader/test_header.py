"""A header is read as the safetensors library reads it, or refused with the reason, whatever its bytes."""

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader import header
from tandem.engine_core.loader.header import (
    BITS,
    MAX_HEADER_BYTES,
    TORCH_DTYPES,
    StoredTensor,
    read_header,
)
from tests.support.safetensors_files import entry, file_bytes, write

NAMES = st.text('ab.é"\\\n\x00☃𝄞{}:', min_size=1, max_size=8)
MUTATIONS = [b'"', b"{", b"}", b"[", b",", b":", b"9", b"-", b"\\", b"\xff"]
A = entry("F32", [2], 0, 8)


def test_names_shapes_dtypes_and_offsets_match_the_library(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3, 2, dtype=dtype) for name, dtype in TORCH_DTYPES.items()}
    tensors |= {"scalar": torch.zeros(()), "empty": torch.zeros(0, 5), 'q"uo\\te ä\n': torch.zeros(1)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "config": '{"a": {"b": "}"}}'})
    found = read_header(path)
    content = path.read_bytes()
    with safe_open(path, "pt") as file:
        assert set(found) == set(file.keys())
        for name, tensor in found.items():
            assert tensor.shape == tuple(file.get_slice(name).get_shape())
            assert tensor.dtype == file.get_slice(name).get_dtype()
            assert tensor.nbytes == file.get_tensor(name).nbytes
    assert max(tensor.start + tensor.nbytes for tensor in found.values()) == len(content)


def test_metadata_spaces_and_an_empty_file_are_read(tmp_path: Path) -> None:
    header = b'{ "__metadata__" : { "a" : "}" } ,\n "w":{"data_offsets":[0,8],"shape":[2],"dtype":"F32","new":null} }  '
    path = write(tmp_path / "a", header, 8)
    assert read_header(path) == {"w": StoredTensor("w", (2,), "F32", path, 8 + len(header), 8)}
    assert read_header(write(tmp_path / "b", b"{} ")) == {}


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "short": (b"1234", r"\b4 bytes"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n",
        "`git lfs pull`",
    ),
    "html": (b"<!DOCTYPE html><html></html>", f"{MAX_HEADER_BYTES}.*another format"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), "14651347271 bytes|another format"),
    "huge length": (file_bytes({"a": A}, 8, 2**40), f"at most {MAX_HEADER_BYTES}"),
    "negative length": (file_bytes({"a": A}, 8, 2**64 - 1), f"at most {MAX_HEADER_BYTES}"),
    "length beyond the file": (file_bytes({"a": A}, 8, 4096), r"header .*\b4096 bytes"),
    "length too short": (file_bytes({"a": A}, 8, 20), r"header .*\bbyte 9\b"),
    "length zero": (file_bytes(b"", 8), "header .*JSON object"),
    "not UTF-8": (file_bytes(b'{"\xff\xfe":' + json.dumps(A).encode() + b"}", 8), "UTF-8"),
    "lone surrogate": (file_bytes(b'{"\\ud800":' + json.dumps(A).encode() + b"}", 8), "UTF-8"),
    "not JSON": (file_bytes(b"{'a': 1}"), r"header .*\bbyte 9\b"),
    "a list": (file_bytes(b"[1, 2]"), "header .*JSON object"),
    "cut off": (file_bytes(json.dumps({"a": A}).encode()[:-1], 8), r"header .*\bbyte 9\b"),
    "goes on": (file_bytes(b"{}{}"), r"header goes on.*\bbyte 10\b"),
    "trailing comma": (file_bytes(json.dumps({"a": A}).encode()[:-1] + b",}", 8), "header .*byte"),
    "deeply nested lists": (file_bytes(b"[" * 100_000), "JSON object"),
    "deeply nested objects": (file_bytes(b'{"a":' * 100_000), r"header .*\bbyte 9\b"),
    "deeply nested in an entry": (file_bytes(b'{"a":{"shape":' + b"[" * 4000 + b"]" * 50 + b"}}"), "malformed"),
    "an entry without end": (file_bytes(b'{"a":{"shape":[' + b"1," * 100_000 + b"1]}}"), "at most 4096"),
    "entry not an object": (file_bytes({"a": 1}), r"header .*\bbyte 9\b"),
    "field missing": (file_bytes({"a": {"dtype": "F32", "shape": [2]}}, 8), r"entry of a\b.*data_offsets"),
    "name twice": (
        file_bytes(b'{"a":' + json.dumps(A).encode() + b',"\\u0061":' + json.dumps(A).encode() + b"}", 8),
        "names a twice",
    ),
    "metadata twice": (file_bytes(b'{"__metadata__":{},"__metadata__":{}}'), "names __metadata__ twice"),
    "field twice": (
        file_bytes(b'{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', 8),
        r"entry of a\b.*twice",
    ),
    "overlap": (file_bytes({"a": A, "b": entry("F32", [2], 4, 12)}, 12), "a and b overlap"),
    "same bytes": (file_bytes({"a": A, "b": A}, 8), "a and b overlap"),
    "gap": (file_bytes({"a": A, "b": entry("F32", [2], 12, 20)}, 20), "bytes [0-9]+ to [0-9]+ .*no tensor$"),
    "gap at the start": (file_bytes({"a": entry("F32", [2], 8, 16)}, 16), "no tensor$"),
    "rest at the end": (file_bytes({"a": A}, 9), "end, .*no tensor"),
    "beyond the file": (file_bytes({"a": A}, 7), r"\ba ends at byte [0-9]+\D+[0-9]+;"),
    "far beyond the file": (file_bytes({"a": entry("U8", [2**62], 0, 2**62)}, 8), r"\ba ends at"),
    "offsets swapped": (file_bytes({"a": entry("F32", [2], 8, 0)}, 8), " -8 bytes"),
    "offsets negative": (file_bytes({"a": entry("F32", [2], -8, 0)}, 8), r"entry of a\b"),
    "dimension negative": (file_bytes({"a": entry("F32", [-1, -2], 0, 8)}, 8), r"entry of a\b"),
    "dimension not whole": (file_bytes(b'{"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}}', 8), "malformed"),
    "shape larger": (file_bytes({"a": entry("F32", [3], 0, 8)}, 8), r"shape \[3\] in F32.*\b8 bytes"),
    "shape smaller": (file_bytes({"a": entry("F32", [1], 0, 8)}, 8), r"shape \[1\] in F32"),
    "shape overflows": (
        file_bytes({"a": entry("F32", [2**62, 4, 2], 0, 0)}),
        r"shape \[4611686018427387904, 4",
    ),
    "shape wraps to its size": (file_bytes({"a": entry("U8", [2**32, 2**32], 0, 0)}), r"\ba has the shape"),
    "many huge dimensions": (file_bytes({"a": entry("U8", [2**63] * 150, 0, 8)}, 8), r"\ba has the shape"),
    "digits without end": (
        file_bytes(b'{"a":{"dtype":"U8","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,8]}}', 8),
        r"entry of a\b|\bshape",
    ),
    "dtype unknown": (file_bytes({"a": entry("F31", [2], 0, 8)}, 8), r"\ba .*dtype F31\b.* BOOL\b"),
    "half a byte": (file_bytes({"a": entry("F4", [3], 0, 2)}, 2), r"shape \[3\] in F4\b"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    content, reason = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"/model\.safetensors .*({reason})") as caught:
        read_header(path)
    assert len(str(caught.value)) < 2000
    assert library_reads(path) == (case == "name twice")


def test_a_header_of_more_tensors_than_any_model_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(header, "MAX_TENSORS", 20)
    empty = entry("F32", [0], 0, 0)
    assert len(read_header(write(tmp_path / "w", {str(index): empty for index in range(20)}))) == 20
    with pytest.raises(ConfigError, match=r"\b20 tensors"):
        read_header(write(tmp_path / "w", {str(index): empty for index in range(21)}))


def test_names_in_errors_are_printable_and_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "w", {"a\n\x1b[2J" + "x" * 5000: entry("F31", [2], 0, 8)}, 8)
    with pytest.raises(ConfigError, match=r" a\\n\\x1b\[2Jx+\.\.\. \(5006 .*dtype") as caught:
        read_header(path)
    assert str(caught.value).isprintable()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"/gone .*{os.strerror(errno.ENOENT)}"):
        read_header(tmp_path / "gone")


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[' + b"[]," * 1_000_000,
        b'{"__metadata__":{' + b'"a":"",' * 400_000 + b'"a":""}}',
        b'{"a":{"shape":[' + b"1," * 1_500_000 + b"1]}}",
    ],
)
def test_a_hostile_header_of_3_megabytes_takes_no_more_than_a_few_times_its_size(text: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "w", text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        assert read_header(path) == {}
    except ConfigError:
        assert text[2:3] == b"a"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 4 * len(text)


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Draw a sound header, and the bytes of its tensors."""
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    found: dict[str, Any] = draw(st.sampled_from([{}, {"__metadata__": {"format": "pt"}}]))
    end = 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(TORCH_DTYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        start = end
        end += torch.empty(shape).numel() * BITS[dtype] // 8
        found = found | {name: entry(dtype, shape, start, end)}
    return found, end


@given(headers(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_sound_header_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[dict[str, Any], int], ascii_only: bool
) -> None:
    header, data = drawn
    path = tmp_path_factory.getbasetemp() / "sound.safetensors"
    write(path, json.dumps(header, ensure_ascii=ascii_only).encode(), data)
    found = read_header(path)
    assert {name: (list(tensor.shape), tensor.dtype) for name, tensor in found.items()} == {
        name: (value["shape"], value["dtype"]) for name, value in header.items() if name != "__metadata__"
    }


@given(headers(), st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_bytes_are_read_or_refused_and_never_believed(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[dict[str, Any], int], data: st.DataObject
) -> None:
    content = bytearray(file_bytes(*drawn))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1)) if content else 0
        cut = data.draw(st.integers(0, 3))
        content[place : place + cut] = data.draw(st.binary(max_size=3) | st.sampled_from(MUTATIONS))
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        found = read_header(path)
    except ConfigError:
        return
    taken = sum(tensor.nbytes for tensor in found.values())
    assert taken + 8 + int.from_bytes(content[:8], "little") == len(content)
