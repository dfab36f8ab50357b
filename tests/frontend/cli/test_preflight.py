"""`--check` of serve, engine and frontend."""

import json
import os
import re
import socket
import sqlite3
import stat
from pathlib import Path

import pytest
from msgspec import structs

from tandem.frontend.cli.main import build_parser, main
from tandem.frontend.cli.preflight import run_check
from tandem.frontend.hub.client import HubModel
from tandem.frontend.listening import listen
from tandem.frontend.store.sqlite_file import FILE_NAME, open_store
from tandem.frontend.store.store import StoreLimits
from tandem.protocol.curve import make_client, make_curve
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.preflight import PreflightReport
from tests.fakes.hub_server import hub_server
from tests.fakes.scripted_engine import DEFAULT_MODEL
from tests.fakes.tokenizer import write_tokenizer
from tests.support.hub_models import NAME, SINGLE, hub_model, repository
from tests.support.refusals import numbers_in
from tests.support.tcp_proxy import free_ports

CHOICES = PreflightReport([], {"architecture": "LlamaForCausalLM", "supported": "yes"}, {"rows": "32 (default on cpu)"})
FREE = ("--port", "0", "--ops-port", "0")
TCP = ("--endpoint", "tcp://127.0.0.1:{port}", "--insecure-tcp")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    return folder


class Checked:
    """Exit code and lines of a check, whose engine says what `engine` is."""

    def __init__(
        self,
        capsys: pytest.CaptureFixture[str],
        command: str,
        model: str,
        *argv: str,
        engine: PreflightReport = CHOICES,
    ) -> None:
        self.asked: list[tuple[EngineOptions, int | None]] = []

        def ask(options: EngineOptions, weight_bytes: int | None) -> PreflightReport:
            self.asked.append((options, weight_bytes))
            return engine

        capsys.readouterr()
        self.code = run_check(build_parser().parse_args([command, "--model", model, *argv, "--check"]), ask=ask)
        text = capsys.readouterr()
        self.summary = text.out.splitlines()
        self.lines = text.err.splitlines()
        self.problems = [line.removeprefix("problem: ") for line in self.lines if line.startswith("problem: ")]
        self.warnings = [line.removeprefix("warning: ") for line in self.lines if line.startswith("warning: ")]
        assert len(self.lines) == len(self.problems) + len(self.warnings)
        assert self.code == (2 if self.problems else 0)


def test_a_problem_of_several_lines_keeps_them(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """As the tensors of a checkpoint that do not fit, of which a start has a line each."""
    wrong = PreflightReport([], {}, {}, problems=["these tensors do not fit:\n  a is [1]\n\n  b  is [2]", "another"])
    arguments = build_parser().parse_args(["serve", "--model", str(model), *FREE, "--check"])
    assert run_check(arguments, ask=lambda *_: wrong) == 2
    text = capsys.readouterr()
    said = ["problem: these tensors do not fit:", "    a is [1]", "    b is [2]", "problem: another"]
    assert text.err.splitlines() == said
    assert numbers_in(text.out.splitlines()[-1]) == [2]


def test_good_settings_have_no_line_on_stderr_and_a_summary(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    good = Checked(capsys, "serve", str(model), *FREE, "--state-dir", str(state), "--max-len", "64")
    assert (good.code, good.lines) == (0, []) and good.summary[-1].startswith("tandem serve ")
    assert [options.model for options, _ in good.asked] == [str(model)]
    assert "architecture      LlamaForCausalLM" in good.summary
    assert f"state             {state}" in good.summary
    assert not state.exists()
    assert Checked(capsys, "engine", str(model), "--ops-port", "0", "--endpoint", f"ipc://{tmp_path}/run/e").code == 0
    assert not (tmp_path / "run").exists()
    frontend = Checked(capsys, "frontend", str(model), *FREE, "--endpoint", "tcp://10.0.0.1:5555", "--insecure-tcp")
    assert (frontend.lines, frontend.asked) == ([], []) and frontend.summary[-1].startswith("tandem frontend ")


def test_every_problem_has_a_line_and_none_hides_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "caf\N{LATIN SMALL LETTER E WITH ACUTE}")
    config = tmp_path / "tandem.toml"
    config.write_text('cors-origin = "example"\nstep-timeout = 0\nmax-concurrent = 0\nmax-rows = 0\npage-size = 7\n')
    argv = ("--config", str(config), "--tls-cert", str(tmp_path), "--api-keys", str(tmp_path / "none"), *FREE)
    more = ("--endpoint", "ipc://relative", "--chat-template", str(tmp_path / "none.jinja"), "--host", "no.invalid")
    assert main(["serve", "--check", "/nowhere", *argv, *more, "--otlp-traces-endpoint", "x"]) == 2
    text = capsys.readouterr()
    found = text.err.splitlines()
    expected = [
        "--step-timeout must be between", "--max-concurrent must be between", "--max-rows 0: must be from",
        "--page-size 7 is not a power of two", "the model /nowhere is not a directory", "cannot listen on no.invalid",
        "endpoint ipc://relative is not an absolute path", "--tls-cert and --tls-key belong together",
        "--cors-origin example is not an origin", "--otlp-traces-endpoint x is not a URL", "an API key must have",
        "--api-keys ", "the chat template ",
    ]  # fmt: skip
    assert len(found) == len(expected), found
    for start in expected:
        assert len([line for line in found if line.startswith(f"problem: {start}")]) == 1, (start, found)
    assert numbers_in(text.out.splitlines()[-1]) == [len(expected)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"tokenizer.json": "{}"}, "cannot be read"),
        ({"tokenizer.json": None}, "has no tokenizer.json"),
        ({"chat_template.jinja": "{% if %}"}, "chat_template.jinja"),
        ({"config.json": '{"max_position_embeddings": 8}'}, "--max-len 64 is more than the 8 positions"),
    ],
)
def test_what_is_wrong_with_the_model_s_folder_is_a_problem(
    capsys: pytest.CaptureFixture[str], model: Path, content: dict[str, str | None], problem: str
) -> None:
    for name, text in content.items():
        (model / name).unlink(missing_ok=True)
        if text is not None:
            (model / name).write_text(text)
    found = Checked(capsys, "serve", str(model), *FREE, "--max-len", "64")
    assert [problem in line for line in found.problems] == [True]


def test_the_engine_says_what_it_cannot_serve_and_what_others_use(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    refused = Checked(capsys, "serve", str(model), *FREE, engine=PreflightReport(problems=["GPT2 is not supported"]))
    assert refused.problems == ["GPT2 is not supported"]
    short = Checked(
        capsys, "serve", str(model), *FREE, engine=PreflightReport(shortage="the weights take 9 GiB, 1 is free")
    )
    assert (short.code, len(short.warnings)) == (0, 1)
    assert numbers_in(short.summary[-1]) == [1]
    assert short.warnings[0].startswith("the weights take 9 GiB, 1 is free now; ")


def test_problems_of_the_engine_are_told_beside_wrong_numbers(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """The engine is asked without the numbers that are wrong, so what it says of their flags is left out."""
    engine = PreflightReport(
        problems=["--kv-memory and --kv-tokens both size the KV pool", "--max-step-tokens 8 is below --max-rows 32"]
    )
    flags = ("--max-rows", "0", "--max-len", "65", "--kv-tokens", "9")
    found = Checked(capsys, "serve", str(model), *FREE, *flags, engine=engine)
    assert [(asked.max_rows, asked.max_len, asked.kv_tokens) for asked, _ in found.asked] == [(None, None, 9)]
    assert [line[:14] for line in found.problems] == ["--max-rows 0: ", "--max-len 65 i", "--kv-memory an"]


def test_a_missing_draft_model_is_one_problem(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """The engine is asked about all else."""
    report = structs.replace(CHOICES, problems=["--max-rows 3: too many", "--speculate-tokens 3 needs --speculate"])
    argv = ("--speculate", "model:/nowhere", "--speculate-tokens", "3")
    found = Checked(capsys, "serve", str(model), *argv, *FREE, engine=report)
    [(options, _)] = found.asked
    assert options.speculate == "off"
    assert len(found.problems) == 2
    assert [problem for problem in found.problems if "/nowhere" in problem] == found.problems[:1]


def test_folders_of_adapters_and_checkpoints_are_checked(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    none, enabled = str(tmp_path / "none"), ("--enable-lora", "--enable-weight-updates")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / file).touch()
    modules = ("--lora-modules", f"a={none}", f"b={adapter}", "c=me/adapter", f"d={none}")
    roots = ("--lora-root", str(tmp_path), "--swap-root", str(tmp_path))
    good = Checked(capsys, "serve", str(model), *FREE, *enabled, modules[0], *modules[2:4], *roots)
    assert good.problems == []
    disabled = Checked(capsys, "serve", str(model), *FREE, *modules, *roots)
    assert sorted(text.split()[0] for text in disabled.problems) == ["--lora-modules", "--swap-root"]
    wrong = Checked(capsys, "serve", str(model), *FREE, *enabled, *modules, "--lora-root", none, "--swap-root", none)
    assert len(wrong.problems) == 4 and all(none in text for text in wrong.problems)
    for start in ("--lora-modules a=", "--lora-modules d=", "--lora-root ", "--swap-root "):
        assert len([text for text in wrong.problems if text.startswith(start)]) == 1, start
    engine = ("--ops-port", "0", "--endpoint", f"ipc://{tmp_path}/run/e", "--enable-lora", "--lora-modules")
    assert len(Checked(capsys, "engine", str(model), *engine, f"{model.name}=me/adapter").problems) == 1


def test_an_address_in_use_is_a_warning_that_names_who_has_it(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for flags in (("--port", str(port), "--ops-port", "0"), ("--port", "0", "--ops-port", str(port))):
            found = Checked(capsys, "serve", str(model), *flags)
            assert (found.code, found.problems) == (0, [])
            (warning,) = found.warnings
            assert re.search(rf" 127\.0\.0\.1:{port} .*\(process {os.getpid()}\)", warning)
        endpoint = [word.format(port=port) for word in TCP]
        (warning,) = Checked(capsys, "engine", str(model), "--ops-port", "0", *endpoint).warnings
        assert re.search(rf"--endpoint tcp://127\.0\.0\.1:{port} .*\b{port} and {port + 1}\b", warning)


def test_a_running_service_on_the_same_socket_is_a_warning_and_stays(
    capsys: pytest.CaptureFixture[str], model: Path, ipc_dir: Path
) -> None:
    path, engine = ipc_dir / "api", ipc_dir / "engine"
    flags = ("--ops-port", "0", "--uds", str(path), "--endpoint", f"ipc://{engine}")
    assert Checked(capsys, "serve", str(model), *flags).lines == []
    assert not path.exists() and not engine.exists()
    with socket.socket(socket.AF_UNIX) as api, socket.socket(socket.AF_UNIX) as core:
        for sock, place in ((api, path), (core, engine)):
            sock.bind(str(place))
            sock.listen()
        found = Checked(capsys, "serve", str(model), *flags)
        assert found.problems == [] and len(found.warnings) == 2
        assert numbers_in(found.summary[-1]) == [2]
        assert str(path) in found.warnings[0] and str(engine) in found.warnings[1]
        assert path.exists() and engine.exists()


def test_one_port_for_two_addresses_of_the_command_is_a_problem(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    port = str(free_ports(2))
    (problem,) = Checked(capsys, "serve", str(model), "--port", port, "--ops-port", port).problems
    assert numbers_in(problem).count(int(port)) >= 1 and "this command" in problem
    endpoint = [word.format(port=port) for word in TCP]
    (problem,) = Checked(capsys, "serve", str(model), "--port", port, "--ops-port", "0", *endpoint).problems
    assert numbers_in(problem).count(int(port)) >= 1 and "this command" in problem


def test_an_address_that_this_machine_lacks_is_a_problem(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (problem,) = Checked(capsys, "serve", str(model), *FREE, "--host", "192.0.2.1").problems[:1]
    assert " 192.0.2.1:0" in problem
    endpoint = ("--endpoint", "tcp://192.0.2.1:5555", "--insecure-tcp")
    (problem,) = Checked(capsys, "engine", str(model), "--ops-port", "0", *endpoint).problems
    assert problem.startswith("--endpoint tcp://192.0.2.1:5555 ")


def test_ports_that_no_socket_can_have_are_told_with_the_other_problems(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    command = ["frontend", "--model-dir", str(model), "--endpoint", "http://x", "--port", "65536", "--ops-port", "-1"]
    assert main([*command, "--check"]) == 2
    problems = capsys.readouterr().err.splitlines()
    for flag, value in (("--port", 65536), ("--ops-port", -1)):
        assert [numbers_in(line) for line in problems if line.startswith(f"problem: {flag} ")] == [[0, 65535, value]]
    assert [line for line in problems if "ipc://" in line and "tcp://" in line] and len(problems) == 3


def test_a_frontend_without_a_model_has_the_default_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["frontend", "--endpoint", f"ipc://{tmp_path}/engine", *FREE, "--check"]) == 0
    facts = capsys.readouterr().out.splitlines()
    (folder,) = [Path(fact.split()[1]) for fact in facts if fact.startswith("model ")]
    assert folder.resolve() == DEFAULT_MODEL.resolve()
    assert [fact for fact in facts if re.match(r"chat .*\btemplate\b", fact)]


def test_an_open_host_without_keys_is_a_warning(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("serve", str(model), *FREE, "--host", "0.0.0.0")
    (warning,) = Checked(capsys, *argv).warnings
    assert "0.0.0.0:0" in warning
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    assert Checked(capsys, *argv).lines == []


def test_keys_of_the_link_must_be_those_of_their_side(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    make_curve(keys)
    _, client = make_client(keys, "web")
    link = ("--endpoint", f"tcp://127.0.0.1:{free_ports(2)}", "--curve-keys")
    assert Checked(capsys, "engine", str(model), "--ops-port", "0", *link, str(keys)).problems == []
    (problem,) = Checked(capsys, "engine", str(model), "--ops-port", "0", *link, str(client)).problems
    assert "engine.key_secret" in problem
    assert Checked(capsys, "frontend", str(model), *FREE, *link, str(client)).problems == []
    (problem,) = Checked(capsys, "frontend", str(model), *FREE, *link, str(tmp_path)).problems
    assert str(tmp_path) in problem


def test_the_folder_of_an_ipc_endpoint_must_be_private(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    (problem,) = Checked(capsys, "engine", str(model), "--ops-port", "0", "--endpoint", f"ipc://{tmp_path}/e").problems
    assert "mode 0700" in problem


def test_a_store_is_looked_at_and_left_as_it_is(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    argv = ("serve", str(model), *FREE, "--state-dir", str(state))
    open_store(state, StoreLimits()).close()
    before = (state / FILE_NAME).read_bytes()
    assert Checked(capsys, *argv).lines == []
    with sqlite3.connect(state / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    (problem,) = Checked(capsys, *argv).problems
    assert "version 99" in problem
    (state / FILE_NAME).write_bytes(b"x" * len(before))
    (problem,) = Checked(capsys, *argv).problems
    assert str(state / FILE_NAME) in problem
    (problem,) = Checked(capsys, *argv[:-1], str(model / "config.json")).problems
    assert str(model / "config.json") in problem and "directory" in problem


def test_the_small_files_of_a_model_on_the_hub_are_downloaded_and_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {**SINGLE, "tokenizer.json": (DEFAULT_MODEL / "tokenizer.json").read_bytes()}
    with hub_server({NAME: repository(files)}) as hub:
        monkeypatch.setattr(HubModel, "open", lambda name, _: hub_model(hub, tmp_path, name))
        argv = (NAME, *FREE, "--download-dir", str(tmp_path))
        found = Checked(capsys, "serve", *argv)
        assert (found.code, found.lines) == (0, [])
        ((options, weight_bytes),) = found.asked
        assert weight_bytes == len(SINGLE["model.safetensors"])
        assert (Path(options.model or "") / "config.json").read_bytes() == SINGLE["config.json"]
        assert any(line.startswith("download          6 files, ") for line in found.summary), found.summary
        refusing = PreflightReport([], {}, {}, problems=["the architecture MixtralForCausalLM is not supported"])
        assert Checked(capsys, "serve", *argv, engine=refusing).problems == refusing.problems
        assert Checked(capsys, "frontend", *argv, "--endpoint", f"ipc://{tmp_path}/e").code == 0
        assert hub.bodies("model.safetensors") == []
        (problem,) = Checked(capsys, "serve", "org/other", *argv[1:]).problems
        assert "org/other" in problem


def test_a_model_that_is_not_downloaded_is_a_problem_without_the_hub(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("serve", "org/never", *FREE, "--download-dir", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (problem,) = Checked(capsys, *argv).problems
    assert "org/never" in problem and "cache" in problem
    assert stat.S_ISDIR(tmp_path.stat().st_mode) and list(tmp_path.iterdir()) == []


def test_names_of_a_file_are_all_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "tandem.toml"
    config.write_text('max-lenn = 1\nmax-rows = "x"\nhost = 5\n')
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--check", "--config", str(config)])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    for named in ("max-lenn;.* max-len\\?", "max-rows .*integer", "host .*string"):
        assert re.search(named, text)


@pytest.mark.slow
def test_command_checks_the_model_with_the_engine_s_own_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["serve", "--check", *FREE, "--device", "cpu", "--max-rows", "3"]) == 0
    assert re.search(r"\brows +3 \(.*--max-rows\)", capsys.readouterr().out)
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gguf"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    assert main(["engine", "--check", str(tmp_path), "--ops-port", "0", "--endpoint", "ipc:///tmp/none/e"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
