"""Help in two lengths, and flags that a command does not have."""

import argparse
import re

import pytest

from tandem.frontend.cli.main import build_parser, main
from tandem.frontend.cli.parsing.command_help import COMMANDS
from tandem.frontend.cli.parsing.foreign_flags import FOREIGN_FLAGS
from tandem.frontend.cli.parsing.parser import CommandParser
from tests.support.flag_tables import commands

SERVERS = ("serve", "engine", "frontend")


def parser_of(command: str) -> CommandParser:
    parser = commands()[command]
    assert isinstance(parser, CommandParser)
    return parser


def shown_flags(text: str, parser: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a parser that a help text lists, each on a line of its own."""
    listed = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE))
    return {action.option_strings[-1 if "-h" in action.option_strings else 0] for action in parser._actions
            if listed & set(action.option_strings)}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_description_a_usage_line_and_examples_that_parse(command: str) -> None:
    text = parser_of(command).format_help()
    usage, _, description, *_ = text.splitlines()
    assert usage.startswith(f"usage: tandem {command} ")
    assert description[0].isupper()
    examples = text.rpartition("examples:\n")[2].splitlines()
    assert 1 <= len(examples) <= 4
    for example in examples:
        words = [word.strip("'") for word in example.partition(" < ")[0].partition(" >> ")[0].split(" ") if word]
        assert words[0] == "tandem"
        if not any("'" in word for word in example.split()) and "--json-schema" not in words:
            build_parser().parse_args(words[1:])


def test_every_command_has_a_text_and_every_text_a_command() -> None:
    assert set(commands()) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_values_are_named_by_what_they_are(command: str) -> None:
    for action in parser_of(command)._actions:
        if action.option_strings and action.nargs != 0 and not action.choices and action.help is not argparse.SUPPRESS:
            name = action.option_strings[0].removeprefix("--").replace("-", "_").upper()
            assert action.metavar is not None or name == "ENDPOINT", action.option_strings


@pytest.mark.parametrize("command", SERVERS)
def test_help_shows_everyday_flags_and_help_all_the_others_too(command: str) -> None:
    parser = parser_of(command)
    everyday, everything = (shown_flags(text, parser) for text in (parser.format_help(), parser.format_all()))
    assert {"--model", "--port", "--api-key-file", "--log-level", "--help-all"} - everyday <= {
        "--port",
        "--api-key-file",
    }
    assert everyday < everything
    assert "--step-timeout" in everything - everyday
    public = [action for action in parser._actions if action.option_strings and action.help is not argparse.SUPPRESS]
    assert everything == {action.option_strings[0] for action in public if action.dest != "help"} | {"--help"}
    assert f"{len(everything - everyday)} more flags: tandem {command} --help-all" in parser.format_help()


def test_help_all_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help-all"])
    assert caught.value.code == 0
    assert "--graph-rows LIST" in capsys.readouterr().out


def test_flags_of_other_engines_lead_to_flags_that_exist() -> None:
    known = set(parser_of("serve")._option_string_actions)
    assert not FOREIGN_FLAGS.keys() & known
    for flag, foreign in FOREIGN_FLAGS.items():
        assert foreign.ours.split()[0] in known if foreign.ours else foreign.reason, flag
        assert not foreign.reason.endswith("."), flag


WRONG = [
    (["serve", "--max-model-len", "8"], "tandem serve: error: --max-model-len is --max-len here"),
    (["serve", "m", "-c", "8192"], "-c is --max-len here"),
    (["engine", "--gpu-memory-utilization=0.9"], "--gpu-memory-utilization is --gpu-memory here (a share such as 0.9)"),
    (["serve", "--api-server-count", "4"], "--api-server-count is --frontends here"),
    (["serve", "--disable-log-stats"], "--disable-log-stats: the line every 10 s has the level info"),
    (["serve", "--tp", "2"], "--tp: one GPU per engine; tensor and pipeline parallelism are not supported"),
    (["serve", "-ngl", "99", "--block-size", "16"], "names; --block-size is --page-size here"),
    (["serve", "--trust-remote-code"], "code from checkpoints is never run"),
    (["serve", "--quantize", "awq"], "'fp8'); checkpoints in FP8, INT8, GPTQ or AWQ need no flag"),
    (["engine", "--dtype", "half"], "'float32'); half is float16 here"),
    (["serve", "--kv-dtype", "fp8_e5m2"], "'fp8_e4m3'); fp8 is e4m3, and e5m2 is not supported"),
    (["serve", "--max-wating", "8"], "unknown flag --max-wating; did you mean --max-waiting?"),
    (["serve", "--port_", "8"], "did you mean --port?"),
    (["serve", "--max_model_len", "8"], "--max_model_len is --max-len here"),
    (["serve", "--api_key", "k"], "unknown flag --api_key; did you mean --api-key?"),
    (["serve", "--max-model-length", "8"], "did you mean --max-model-len? --max-model-len is --max-len here"),
    (["serve", "--tensor-paralel-size", "2"], "did you mean --tensor-parallel-size? --tensor-parallel-size: one GPU"),
    (["chat", "--max-model-length", "8"], "unknown flag --max-model-length\n"),
    (["serve", "--xyzzy"], "tandem serve: error: unknown flag --xyzzy\n"),
    (["frontend", "--kv-cache-dtype", "fp8"], "tandem frontend: error: unknown flag --kv-cache-dtype\n"),
    (["run-batch", "-c", "4"], "tandem run-batch: error: unknown flag -c\n"),
    (["chat", "--temprature", "1"], "did you mean --temperature?"),
    (["--verbose", "serve"], "tandem: error: unknown flag --verbose"),
    (["serve", "--port", "abc"], "tandem serve: error: argument --port: invalid int value: 'abc'"),
    (["serve", "--kv-memory", "5Gib"], "--kv-memory: '5Gib' is not a number of bytes"),
    (["serve", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    (["frontend", "m"], "the following arguments are required: --endpoint"),
    (["keys"], "the following arguments are required: DIR"),
    (["srve"], "invalid choice: 'srve'"),
    ([], "the following arguments are required: COMMAND"),
]


@pytest.mark.parametrize(("argv", "text"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_usage_error_is_two_lines(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    command = f"tandem {argv[0]}" if argv and argv[0] in COMMANDS else "tandem"
    many = command != "tandem" and "--help-all" in parser_of(argv[0]).format_help()
    assert error.splitlines()[1:] == [f"See {command} {'--help-all' if many else '--help'}"]


def test_negative_numbers_and_words_after_two_dashes_are_not_flags() -> None:
    parse = build_parser().parse_args
    assert parse(["serve", "--kv-tokens", "-5"]).kv_tokens == -5
    assert parse(["complete", "--", "--tp"]).prompt == "--tp"
    assert parse(["complete", "-x y"]).prompt == "-x y"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--page-size", "15"], "--page-size 15 is not a power of two"),
        (["--kv-tokens", "-5"], "--kv-tokens -5: must be at least 1"),
        (["--max-rows", "0"], "--max-rows 0: must be from 1 to 16384"),
        (["--max-rows", "1000000"], "--max-rows 1000000: must be from 1 to 16384"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["engine", "--endpoint", "ipc:///x"]])
def test_numbers_of_the_engine_are_refused_before_a_process_starts(
    command: list[str], flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 2
    assert (
        capsys.readouterr().err
        == f"tandem: {reason}{'' if 'power' not in reason else '; use one, or max for one page per sequence'}\n"
    )


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["serve", "a", "--model", "b"], "the model is given twice, as a and as --model b"),
        (["frontend", "a", "--model", "b", "--endpoint", "ipc:///x"], "the model is given twice"),
        (["frontend", "/none", "--endpoint", "ipc:///x", "--port", "0"], "the model /none is not a directory"),
    ],
)
def test_model_is_given_in_one_way(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert reason in capsys.readouterr().err
