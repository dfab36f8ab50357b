"""Flags that one process parses and passes to another."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.curve import make_curve
from tandem.protocol.engine_options import (
    POLICIES,
    EngineOptions,
    add_engine_arguments,
    check_numbers,
    engine_argv,
    engine_options,
)
from tandem.protocol.transport_options import add_transport_arguments, transport, transport_argv

INTS = st.integers(-(2**40), 2**40)
MAYBE = st.none() | INTS
NAMES = st.none() | st.text(min_size=1, max_size=12).filter(lambda name: name != "--")
OPTIONS = st.builds(
    EngineOptions,
    model=NAMES,
    served_model_name=NAMES,
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    dtype=st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
    pipeline=st.sampled_from([None, "on", "off"]),
    max_rows=MAYBE,
    max_len=MAYBE,
    max_step_tokens=MAYBE,
    prefill_chunk=MAYBE | st.just("off"),
    max_prefill_chunks_per_step=MAYBE,
    policy=st.sampled_from(POLICIES),
    batching=st.sampled_from(["continuous", "static"]),
    prefix_cache=st.sampled_from([None, "on", "off"]),
    session_ttl=st.none() | st.floats(allow_nan=False),
    max_sessions=MAYBE,
    page_size=MAYBE | st.just("max"),
    kv_tokens=MAYBE,
    kv_memory=MAYBE,
    gpu_memory=st.none() | st.floats(0, 1),
    kv_dtype=st.sampled_from(["auto", "fp8", "fp8_e4m3"]),
    max_waiting=MAYBE,
    threads=MAYBE,
)


def parse(argv: list[str]) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_options(parser.parse_args(argv))


@given(OPTIONS)
def test_engine_argv_parses_to_equal_options(options: EngineOptions) -> None:
    argv = list(engine_argv(options))
    assert all(isinstance(word, str) for word in argv)
    assert parse(argv) == options


@pytest.mark.parametrize("name", ["-x", "--device", "-1", "a b", "a=b"])
def test_engine_argv_keeps_names_that_look_like_flags(name: str) -> None:
    options = EngineOptions(model=name, served_model_name=name)
    assert parse(list(engine_argv(options))) == options


def test_engine_options_without_flags_are_the_defaults() -> None:
    assert parse([]) == EngineOptions()
    assert engine_options(argparse.Namespace(**dict.fromkeys(EngineOptions.__struct_fields__))).max_rows is None


BYTES = "not a number of bytes; write one like 1000000, 512MiB, 4GiB or 4G"
WRONG = [
    (["--no-such-flag"], "--no-such-flag"),
    (["--max-rows", "many"], "--max-rows: invalid int value: 'many'"),
    (["--max-rows", "1.5"], "'1.5'"),
    (["--device", "tpu"], "'tpu'"),
    (["--dtype", "int8"], "'int8'"),
    (["--pipeline", "maybe"], "'maybe'"),
    (["--policy", "magic"], "'magic'"),
    (["--prefill-chunk", "some"], "--prefill-chunk: 'some' is neither off nor a whole number"),
    (["--max-rows"], "--max-rows: expected one argument"),
    (["--page-size", "large"], "--page-size: 'large' is not a power of two, or max"),
    (["--kv-memory", "4GB"], f"--kv-memory: '4GB' is {BYTES}"),
    (["--kv-memory", "GiB"], f"'GiB' is {BYTES}"),
    (["--kv-memory", "infGiB"], f"'infGiB' is {BYTES}"),
    (["--kv-memory", "nanKiB"], f"'nanKiB' is {BYTES}"),
    (["--gpu-memory", "most"], "--gpu-memory: invalid float value: 'most'"),
    (["--session-ttl", "long"], "--session-ttl: invalid float value: 'long'"),
    (["--kv-dtype", "int4"], "'int4'"),
]


@pytest.mark.parametrize(("argv", "text"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_malformed_flags_are_named_in_the_error(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err.partition("error:")[2]
    assert text in error
    assert "value: _" not in error and " _" not in error, "names of our own functions mean nothing to people"


@pytest.mark.parametrize(
    ("text", "count"),
    [("2TiB", 2**41), ("4GiB", 2**32), ("0.5GiB", 2**29), ("512MiB", 2**29), ("3KiB", 3072), ("1000", 1000)],
)
def test_memory_sizes_are_parsed_with_units(text: str, count: int) -> None:
    assert parse(["--kv-memory", text]).kv_memory == count


OUT_OF_BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"max_rows": 0}, "--max-rows 0: must be from 1 to 16384"),
    ({"max_rows": 1_000_000}, "--max-rows 1000000: must be from 1 to 16384"),
    ({"max_len": 1}, "--max-len 1: must be at least 2"),
    ({"max_waiting": 0}, "--max-waiting 0: must be at least 1"),
    ({"max_step_tokens": 2**21}, "--max-step-tokens 2097152: must be from 1 to 1048576"),
    ({"prefill_chunk": 0}, "--prefill-chunk 0: must be at least 1"),
    ({"max_prefill_chunks_per_step": 0}, "--max-prefill-chunks-per-step 0: must be at least 1"),
    ({"session_ttl": -1.0}, "--session-ttl -1: must be from 0 to"),
    ({"session_ttl": float("inf")}, "--session-ttl inf: must be from 0 to"),
    ({"max_sessions": -1}, "--max-sessions -1: must be at least 0"),
    ({"page_size": 0}, "--page-size 0: must be at least 1"),
    ({"page_size": 15}, "--page-size 15 is not a power of two; use one, or max"),
    ({"kv_tokens": -5}, "--kv-tokens -5: must be at least 1"),
    ({"kv_memory": 0}, "--kv-memory 0: must be at least 1"),
    ({"gpu_memory": 0.0}, "--gpu-memory 0: must be from 0.001 to 1"),
    ({"gpu_memory": 1.01}, "--gpu-memory 1.01: must be from 0.001 to 1"),
    ({"gpu_memory": float("nan")}, "--gpu-memory nan: must be from 0.001 to 1"),
    ({"threads": 0}, "--threads 0: must be from 1 to 4096"),
]


@pytest.mark.parametrize(("options", "text"), OUT_OF_BOUNDS, ids=[text for _, text in OUT_OF_BOUNDS])
def test_numbers_out_of_bounds_are_refused_without_a_model(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        check_numbers(EngineOptions(**options))


def test_words_and_defaults_are_within_bounds() -> None:
    check_numbers(EngineOptions())
    check_numbers(EngineOptions(page_size="max", prefill_chunk="off", max_sessions=0, session_ttl=0.0, kv_tokens=1))


def test_every_flag_has_help() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    text = parser.format_help()
    for name in EngineOptions.__struct_fields__:
        assert "--" + name.replace("_", "-") in text


class TestTransport:
    def parse(self, argv: list[str], required: bool = False) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        add_transport_arguments(parser, endpoint_required=required)
        return parser.parse_args(argv)

    def test_transport_without_flags_has_no_keys_and_forbids_plain_tcp(self) -> None:
        arguments = self.parse([])
        assert arguments.endpoint is None
        settings = transport(arguments)
        assert (settings.curve, settings.insecure_tcp) == (None, False)
        assert transport_argv(arguments) == []

    def test_a_missing_required_endpoint_is_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            self.parse([], required=True)
        assert "--endpoint" in capsys.readouterr().err

    def test_transport_argv_parses_to_an_equal_transport(self, tmp_path: Path) -> None:
        make_curve(tmp_path / "keys")
        arguments = self.parse(["--curve-keys", str(tmp_path / "keys"), "--insecure-tcp"])
        again = self.parse(transport_argv(arguments))
        assert transport(again) == transport(arguments)
        assert transport(again).curve is not None
        assert transport(again).insecure_tcp

    def test_a_directory_without_keys_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"engine\.key_secret\b"):
            transport(self.parse(["--curve-keys", str(tmp_path)]))
