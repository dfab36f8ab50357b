"""Flags that one process parses and hands to another."""

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.engine_options import EngineOptions, add_engine_arguments, engine_argv, engine_options
from protocol.sockets import make_curve
from protocol.transport_options import add_transport_arguments, transport, transport_argv

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
    prefill_chunk=MAYBE,
    page_size=INTS,
    kv_tokens=MAYBE,
    max_waiting=INTS,
    threads=MAYBE,
)


def parse(argv: list[str]) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_options(parser.parse_args(argv))


@given(OPTIONS)
def test_the_other_process_parses_equal_options(options: EngineOptions) -> None:
    argv = list(engine_argv(options))
    assert all(isinstance(word, str) for word in argv)
    assert parse(argv) == options


@pytest.mark.parametrize("name", ["-x", "--device", "-1", "a b", "a=b"])
def test_names_that_look_like_flags(name: str) -> None:
    options = EngineOptions(model=name, served_model_name=name)
    assert parse(list(engine_argv(options))) == options


def test_defaults() -> None:
    assert parse([]) == EngineOptions()
    assert engine_options(argparse.Namespace(**dict.fromkeys(EngineOptions.__struct_fields__))).max_rows is None


WRONG = [
    ["--no-such-flag"],
    ["--max-rows", "many"],
    ["--max-rows", "1.5"],
    ["--device", "tpu"],
    ["--dtype", "int8"],
    ["--pipeline", "maybe"],
    ["--max-rows"],
]


@pytest.mark.parametrize("argv", WRONG, ids=" ".join)
def test_what_is_not_understood_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


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

    def test_defaults(self) -> None:
        arguments = self.parse([])
        assert arguments.endpoint is None
        settings = transport(arguments)
        assert (settings.curve, settings.insecure_tcp) == (None, False)
        assert transport_argv(arguments) == []

    def test_a_required_endpoint(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            self.parse([], required=True)
        assert "--endpoint" in capsys.readouterr().err

    def test_the_other_process_gets_the_same_transport(self, tmp_path: Path) -> None:
        make_curve(tmp_path / "keys")
        arguments = self.parse(["--curve-keys", str(tmp_path / "keys"), "--insecure-tcp"])
        again = self.parse(transport_argv(arguments))
        assert transport(again) == transport(arguments)
        assert transport(again).curve is not None
        assert transport(again).insecure_tcp

    def test_a_directory_without_keys(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"holds neither engine\.key_secret nor engine\.key"):
            transport(self.parse(["--curve-keys", str(tmp_path)]))
