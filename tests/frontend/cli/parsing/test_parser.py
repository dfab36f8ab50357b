"""Help in two lengths, and flags that a command does not have."""

import argparse
import re
from pathlib import Path

import pytest

from tandem.frontend.cli.main import build_parser, main
from tandem.frontend.cli.parsing.command_help import COMMANDS
from tandem.frontend.cli.parsing.foreign_flags import ALIASES, FOREIGN_FLAGS
from tandem.frontend.cli.parsing.parser import CommandParser
from tests.support.flag_tables import commands, groups

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
    assert not FOREIGN_FLAGS.keys() & ALIASES.keys()
    for flag, foreign in FOREIGN_FLAGS.items():
        assert foreign.ours.split()[0] in known if foreign.ours else foreign.reason, flag
        assert not foreign.reason.endswith("."), flag


WRONG = [
    (["serve", "m", "-c", "8192"], "tandem serve: error: -c is --max-len here (of one sequence"),
    (["engine", "--mem-fraction-static=0.9"], "--mem-fraction-static is --gpu-memory here (a share such as 0.9"),
    (["serve", "--cuda-graph-max-bs", "64"], "--cuda-graph-max-bs is --graph-rows here (a list"),
    (["serve", "--enable-sleep-mode"], "--enable-sleep-mode is --enable-weight-updates here (which"),
    (["serve", "--enable-memory-saver"], "--enable-memory-saver is --enable-weight-updates here (which"),
    (["serve", "--weight-transfer-config", "{}"], "--weight-transfer-config is --enable-weight-updates here (NCCL"),
    (["serve", "--task", "embed"], "--task: models generate text; embeddings and scores are not supported"),
    (["engine", "--enable_expert_parallel"], "--enable_expert_parallel: one GPU per engine"),
    (["serve", "--schedule-policy", "lpm"], "--schedule-policy is --policy here"),
    (["serve", "--uvicorn-log-level", "info"], "--uvicorn-log-level is --log-level here (of all messages"),
    (["serve", "--allowed-origins", '["*"]'], "--allowed-origins is --cors-origin here (one origin"),
    (
        ["serve", "--enable-log-requests"],
        "--enable-log-requests is --log-requests on here (which logs the prompts too)",
    ),
    (["engine", "--ssl-certfile", "c", "--endpoint", "ipc:///x"], "unknown flag --ssl-certfile\n"),
    (["engine", "--ssl-certfile", "c"], "unknown flag --ssl-certfile\n"),
    (["chat", "-m", "x"], "tandem chat: error: -m is --model here"),
    (["serve", "--disable-log-stats"], "--disable-log-stats: the line every 10 s has the level info"),
    (["serve", "--tp", "2"], "--tp: one GPU per engine; tensor and pipeline parallelism are not supported"),
    (["serve", "-ngl", "99", "--swap-space", "4"], "names; --swap-space: KV is never swapped"),
    (["serve", "--trust-remote-code"], "code from checkpoints is never run"),
    (["serve", "--quantize", "awq"], "'fp8'); checkpoints in FP8, INT8, GPTQ or AWQ need no flag"),
    (["engine", "--dtype", "fp8"], "'float32'); --quantize fp8 stores"),
    (["serve", "--kv-cache-dtype", "fp8_e5m2"], "argument --kv-cache-dtype: invalid choice: 'fp8_e5m2'"),
    (["serve", "--kv-cache-dtype", "fp8_e5m2"], "fp8 is e4m3, and e5m2 is not supported"),
    (["serve", "--kv-dtype", "fp8_e5m2"], "'fp8_e4m3'); fp8 is e4m3, and e5m2 is not supported"),
    (["serve", "--max-wating", "8"], "unknown flag --max-wating; did you mean --max-waiting?"),
    (["serve", "--port_", "8"], "did you mean --port?"),
    (["serve", "--max_modl_len", "8"], "unknown flag --max_modl_len; did you mean --max-model-len?"),
    (["serve", "--max-model-len", "many"], "argument --max-model-len: 'many' is not a whole number"),
    (["serve", "--max-model-length", "8"], "did you mean --max-model-len?\n"),
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
    (["srve"], "tandem: error: unknown command srve; did you mean tandem serve?\n"),
    (["server"], "did you mean tandem serve?\n"),
    (["run_batch"], "did you mean tandem run-batch?\n"),
    (["Serve"], "did you mean tandem serve?\n"),
    (["xyzzy"], "unknown command xyzzy; the commands are serve, engine, "),
    (["Qwen/Qwen3-0.6B", "--port", "1"], "a model is served by tandem serve Qwen/Qwen3-0.6B\n"),
    (["serve", "a", "b"], "tandem serve: error: unexpected argument b; the command is tandem serve [MODEL] [FLAGS]\n"),
    (["engine", "a", "b", "c", "--endpoint", "ipc:///x"], "tandem engine: error: unexpected arguments b c; "),
    (["complete", "two", "words"], "unexpected argument words; the command is tandem complete [PROMPT] [FLAGS]\n"),
    (["chat", "hello"], "tandem chat: error: unexpected argument hello; the command is tandem chat [FLAGS]\n"),
    (["keys", "a", "b"], "tandem keys: error: unexpected argument b"),
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


VALUES = {
    "max_len": "32k", "max_rows": "8", "gpu_memory": "0.5", "page_size": "32", "kv_tokens": "4K", "kv_memory": "1G",
    "max_step_tokens": "2k", "frontends": "3", "model": "Qwen/Qwen3-0.6B", "tls_cert": "c.pem", "tls_key": "k.pem",
    "served_model_name": "fast", "threads": "2", "max_top_logprobs": "5", "drain_timeout": "9", "max_waiting": "7",
    "kv_dtype": "fp8", "lora_modules": "a=/b", "max_loras": "4",
}  # fmt: skip


@pytest.mark.parametrize("word", ALIASES)
def test_alias_means_what_our_flag_does(word: str) -> None:
    alias = ALIASES[word]
    name = alias.ours.removeprefix("--").replace("-", "_")
    parse = build_parser().parse_args
    given = [word] if alias.value is not None else [word, VALUES[name]]
    ours = [alias.ours, VALUES[name] if alias.value is None else alias.value]
    assert vars(parse(["serve", *given])) == vars(parse(["serve", *ours]))
    if alias.value is None:
        assert vars(parse(["serve", f"{word}={VALUES[name]}"])) == vars(parse(["serve", *ours]))


@pytest.mark.parametrize("command", [*SERVERS, "doctor"])
def test_help_lists_aliases_apart_from_the_flags(command: str) -> None:
    parser = parser_of(command)
    aliases = [word for word in ALIASES if word in parser._option_string_actions]
    assert {"-m", "--model-path"} <= set(aliases)
    assert not re.search(r"(?<![\w-])--max-model-len", parser.format_help())
    names = parser.format_all().rpartition("names of other engines:")[2].split("examples:")[0]
    assert {word.rstrip(",") for word in names.split()} >= set(aliases)


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1m", 10**6), ("1M", 2**20), ("0.5K", 512)],
)
def test_number_of_tokens_may_have_a_suffix(text: str, number: int) -> None:
    flags = ("--max-len", "--max-step-tokens", "--prefill-chunk", "--kv-tokens", "--max-queued-tokens")
    for flag in (*flags, "--max-prompt-tokens", "--default-max-tokens"):
        found = build_parser().parse_args(["serve", flag, text])
        assert getattr(found, flag[2:].replace("-", "_")) == number


@pytest.mark.parametrize("text", ["25.6K", "32kb", "k", "", "1.5", "32 K", "1e3", "-", "9" * 400, "0x10"])
def test_other_suffixes_and_fractions_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", f"--max-len={text}"])
    assert "32k (32,000) or 32K (32,768)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 2**32), ("4G", 2**32), ("4g", 4 * 10**9), ("1.5MiB", 3 * 2**19), ("7", 7)]
)
def test_size_of_the_pool_has_binary_or_decimal_units(text: str, size: int) -> None:
    assert build_parser().parse_args(["serve", "--kv-memory", text]).kv_memory == size


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), ("float", "float32"),
     ("bfloat16", "bfloat16"), ("auto", "auto")],
)  # fmt: skip
def test_dtype_has_short_names(text: str, dtype: str) -> None:
    assert build_parser().parse_args(["serve", "--dtype", text]).dtype == dtype


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max_len", "8"], "max_len", 8),
        (["--max_model_len=8"], "max_len", 8),
        (["--gpu_memory_utilization", "0.5"], "gpu_memory", 0.5),
        (["--chat_template", "a_b"], "chat_template", Path("a_b")),
        (["--served-model-name=a_b"], "served_model_name", ["a_b"]),
    ],
)
def test_underscores_of_a_flag_are_dashes(words: list[str], name: str, value: object) -> None:
    assert getattr(build_parser().parse_args(["serve", *words]), name) == value


@pytest.mark.parametrize("flag", ["--ops-port", "--default-max-tokens", "--log-level"])
def test_short_help_has_the_flags_of_the_first_hour(flag: str) -> None:
    assert flag in parser_of("serve").format_help()


def test_log_level_is_in_a_group_of_its_own() -> None:
    assert [action.dest for action in groups()["log"]] == ["log_level", "log_format"]


def test_negative_numbers_and_words_after_two_dashes_are_not_flags() -> None:
    parse = build_parser().parse_args
    assert parse(["serve", "--kv-tokens", "-5"]).kv_tokens == -5
    assert parse(["complete", "--", "--tp"]).prompt == "--tp"
    assert parse(["complete", "-x y"]).prompt == "-x y"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--page-size", "15"], "--page-size 15 .*max"),
        (["--kv-tokens", "-5"], "--kv-tokens -5: .* 1"),
        (["--max-rows", "0"], "--max-rows 0: .* 1 to 16384"),
        (["--max-rows", "1000000"], "--max-rows 1000000: .* 1 to 16384"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["engine", "--endpoint", "ipc:///x"]])
def test_numbers_of_the_engine_are_refused_before_a_process_starts(
    command: list[str], flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 2
    assert re.fullmatch(rf"tandem: {reason}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["serve", "a", "--model", "b"], "as a and as --model b"),
        (["serve", "a", "-m", "b"], "as a and as --model b"),
        (["serve", "a", "--model-path", "b"], "as a and as --model b"),
        (["frontend", "a", "--model", "b", "--endpoint", "ipc:///x"], "as a and as --model b"),
        (["frontend", "/none", "--endpoint", "ipc:///x", "--port", "0"], "/none is not a directory"),
    ],
)
def test_model_is_given_in_one_way(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert reason in capsys.readouterr().err
