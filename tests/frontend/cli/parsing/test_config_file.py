"""Flags from a TOML file."""

import re
from pathlib import Path

import pytest

from tandem.frontend.cli.main import build_parser
from tandem.frontend.cli.parsing import config_file
from tests.support.flag_tables import commands

FILE = """
model = "folder"
max-len = 4096
max_body = 8
host = ["127.0.0.1", "::1"]
cors-origin = "https://a.example"
served-model-name = ["a", "b"]
page-size = "max"
kv-memory = "4GiB"
gpu-memory = 1
drain-timeout = 2.5
prefix-cache = false
insecure-tcp = true
tls-cert = "cert.pem"
uds-mode = "660"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tandem.toml"


def test_file_gives_flags_of_every_kind(file: Path) -> None:
    file.write_text(FILE)
    flags = [
        *("--model", "folder", "--max-len", "4096", "--max-body", "8", "--host", "127.0.0.1", "--host", "::1"),
        *("--cors-origin", "https://a.example", "--served-model-name", "a", "b", "--page-size", "max"),
        *("--kv-memory", "4GiB", "--gpu-memory", "1", "--drain-timeout", "2.5", "--prefix-cache", "off"),
        *("--insecure-tcp", "--tls-cert", "cert.pem", "--uds-mode", "660"),
    ]
    from_file = vars(build_parser().parse_args(["serve", "--config", str(file)]))
    from_flags = vars(build_parser().parse_args(["serve", *flags]))
    assert from_file | {"config": None} == from_flags


def test_file_takes_names_of_other_engines_and_short_values(file: Path) -> None:
    file.write_text(
        'max-model-len = "32k"\nmodel-path = "folder"\ndtype = "half"\nenforce-eager = true\n'
        "enable_prefix_caching = false\nmax-num-seqs = 8\n"
    )
    found = build_parser().parse_args(["serve", "--config", str(file), "--max-rows", "4"])
    assert (found.max_len, found.model, found.dtype, found.graph_rows) == (32_000, "folder", "float16", "off")
    assert (found.prefix_cache, found.max_rows) == (None, 4)


def test_name_of_another_engine_on_the_command_line_wins_over_the_file(file: Path) -> None:
    file.write_text('max-len = 4096\ncors-origin = ["https://a.example"]\nmodel = "folder"\n')
    found = build_parser().parse_args(["serve", "--config", str(file), "--max-model-len=8", "-m", "other"])
    assert (found.max_len, found.cors_origin, found.model) == (8, ["https://a.example"], "other")


@pytest.mark.parametrize(
    "text", ["max-len = 1\nmax-model-len = 2", 'dtype = "int8"', "max-model-len = 1.5", 'max-len = "32kb"']
)
def test_file_refuses_wrong_values_and_a_flag_by_two_names(
    file: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--config", str(file)])
    assert f"{file}:" in capsys.readouterr().err


def test_lines_are_looked_for_only_if_there_is_a_mistake(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a time that grows with the square of a list's length."""
    monkeypatch.setattr(config_file, "_lines_of_names", lambda _: pytest.fail("there is no mistake"))
    file.write_text("served-model-name = [\n" + "".join(f'  "{number}",\n' for number in range(5000)) + "]\n")
    assert len(build_parser().parse_args(["serve", "--config", str(file)]).served_model_name) == 5000


def test_flags_of_the_command_line_win_over_the_file(file: Path) -> None:
    file.write_text(FILE)
    line = ["serve", "other", "--max-len=7", f"--config={file}", "--host", "127.0.0.2", "--served-model-name", "c"]
    found = build_parser().parse_args(line)
    assert (found.max_len, found.host, found.served_model_name) == (7, ["127.0.0.2"], ["c"])
    assert (found.positional_model, found.model) == ("other", None)
    found = build_parser().parse_args(["serve", "--config", str(file), "--model", "third"])
    assert (found.model, found.max_len) == ("third", 4096)


@pytest.mark.parametrize("command", ["engine", "frontend"])
def test_required_flags_may_be_in_the_file(command: str, file: Path) -> None:
    file.write_text('endpoint = "ipc:///run/engine"\nmodel = "m"\nlog-level = "debug"\n')
    found = build_parser().parse_args([command, "--config", str(file)])
    assert (found.endpoint, found.log_level) == ("ipc:///run/engine", "debug")
    assert vars(found)["model_dir" if command == "frontend" else "model"] == "m"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max-lenn = 1", r"\bmax-lenn;.*\bmax-len\?"),
        ("nonsense = 1", r"\bnonsense\n"),
        ("ctx-size = 1", ": ctx-size .*max-len"),
        ("config = 'x'", "unknown .*config"),
        ("slot = 1", "unknown .*slot"),
        ("max-len = '32kb'", "max-len: '32kb'"),
        ("max-len = true", "max-len .*number.* true"),
        ("max-len = 1.5", "max-len: '1.5'"),
        ("max-rows = '4096'", "max-rows .*integer.* '4096'"),
        ("max-rows = true", "max-rows .*integer.* true"),
        ("max-rows = 1.5", "max-rows .*integer.* 1.5"),
        ("max-len = [1]", "max-len .*list"),
        ("drain-timeout = 'x'", "drain-timeout .*number.* 'x'"),
        ("tls-cert = 1", "tls-cert .*string.* 1"),
        ("insecure-tcp = 'yes'", "insecure-tcp .*true or false.* 'yes'"),
        ("policy = 'best'", "policy .*fcfs, "),
        ("page-size = 'big'", "page-size: 'big' .*max"),
        ("uds-mode = '999'", "uds-mode: '999' .*octal"),
        ("[http]\nport = 1", ":1: http .*table"),
        ("[port]\nx = 1", "port .*integer.* table"),
        ("max-len = 1\nmax_len = 2", ":2: max-len and max_len "),
        ("max-len = ", "TOML: "),
        ("port = 1\nmax-len = x\nhost = 1", r"\(at line 2, "),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name(
    text: str, reason: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["serve", "--config", str(file)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.search(reason, error) and str(file) in error


@pytest.mark.parametrize("name", ["api-key", "api_key", "hf-token"])
@pytest.mark.parametrize(
    "value", ["sk-4711", "4711", "47.11", "0x4711", "4711-01-01", "true4711", "[4711]", "[['4711']]", "{ x = 4711 }"]
)
def test_the_value_of_a_secret_is_never_repeated(
    name: str, value: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"port = 1\n{name} = {value}\n")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--config", str(file)])
    error = capsys.readouterr().err
    assert "4711" not in error.replace(str(file), "")
    assert f"{file}:2: {name} " in error or "(at line 2, column " in error


def test_flags_that_others_could_see_are_secrets() -> None:
    """The help of a secret warns of the process list."""
    actions = commands()["serve"]._actions
    assert {action.dest for action in actions if "process list" in str(action.help)} == config_file.SECRETS


def test_every_mistake_is_told_at_once_with_its_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(
        """# portt = 1
api-key = '''
max-lenn = 1
'''
"max-lenn" = 1
host = [  # portt
  "::1",
]

port = "80"
[kv.memory]
max-len = 1
port = 2
[[kv-memories]]
"""
    )
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--config", str(file)])
    told = capsys.readouterr().err.splitlines()
    patterns = ("5: .*max-lenn;.* max-len\\?", "10: port .*'80'", "11: kv .*", "14: .*kv-memories;.* kv-memory\\?")
    for line, pattern in zip(told[:-1], patterns, strict=True):
        assert re.fullmatch(pattern, line.rpartition(f"{file}:")[2])


def test_a_value_of_a_wrong_type_hides_no_number_out_of_bounds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('port = "80"\nmax-concurrent = -3\nmax-rows = 0\npage-size = 3\nkv-memory = "4GiB"\nhost = ["a"]\n')
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--max-rows", "4", "--config", str(file)])
    told = capsys.readouterr().err.splitlines()
    patterns = ("1: port .*'80'", " --max-concurrent .* 1 and 2147483647, .*-3", " --page-size 3 .*")
    for line, pattern in zip(told[:-1], patterns, strict=True):
        assert re.fullmatch(pattern, line.rpartition(f"{file}:")[2])


def test_missing_file_and_missing_name_are_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        ([str(file)], f"--config {file} cannot be read: No such file"),
        ([], "expected one argument"),
    ):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["serve", "--config", *words])
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_byte_order_mark_and_line_ends_of_windows_are_taken(file: Path, newline: str) -> None:
    file.write_bytes(FILE.replace("\n", newline).encode("utf-8-sig"))
    found = build_parser().parse_args(["serve", "--config", str(file)])
    assert (found.model, found.max_len, found.served_model_name) == ("folder", 4096, ["a", "b"])


def test_lines_of_mistakes_count_behind_a_byte_order_mark(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes("max-len = 7\r\nwrong = 1\r\n".encode("utf-8-sig"))
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--config", str(file)])
    assert f"{file}:2:" in capsys.readouterr().err


def test_file_in_utf_16_is_refused_by_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(FILE, encoding="utf-16")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--config", str(file)])
    assert "UTF-16" in capsys.readouterr().err
