"""Real commands with a model that is given by its name, from a fake hub into a fresh cache."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tandem.frontend.cli.main import main
from tandem.frontend.hub.cache import ModelCache
from tests.fakes.hub_server import COMMIT, HubServer, Repository, digest_of, hub_server
from tests.support.hub_models import UNWANTED
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import GUARD_SECONDS, Serving, until

NAME = "org/Tiny-Model"
WEIGHTS = "model.safetensors"
TANDEM = Path(sys.executable).with_name("tandem")


def default_model() -> dict[str, bytes]:
    """Return the files of the model that ships with Tandem."""
    folder = Path(__file__).parents[2] / "engine_core" / "default_model"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server({NAME: Repository(default_model() | UNWANTED)}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield running


def complete(server: Serving, model: str) -> str:
    status, body = server.post("/v1/completions", {"model": model, "prompt": "textwrap.dedent", "max_tokens": 4})
    assert status == 200, body
    return str(body["choices"][0]["text"])


def test_server_downloads_once_continues_after_a_cut_and_serves_from_the_cache(hub: HubServer, tmp_path: Path) -> None:
    hub.cuts[WEIGHTS] = [3 * 2**20]
    with ScriptedServing(tmp_path / "log", NAME) as server:
        assert complete(server, NAME)
        assert json.loads(server.get("/v1/models")[1])["data"][0]["id"] == NAME
        until(lambda: server.said(f"(model {NAME}, commit {COMMIT}, cpu"), "the line that the server is ready")
        log = (tmp_path / "log").read_text()
        assert f"downloading {NAME}, commit {COMMIT}: 4 files, 266 kB" in log
        assert f"downloading {NAME}, commit {COMMIT}: 1 file, 11 MB" in log
        assert "downloaded 100 %" in log
    assert len(hub.lists()) == 1
    assert [len(hub.bodies(name)) for name in ("config.json", "tokenizer.json", WEIGHTS)] == [1, 1, 2]
    assert hub.bodies(WEIGHTS)[1].range.startswith("bytes=")
    (weights,) = (tmp_path / "home").rglob(WEIGHTS)
    assert weights.read_bytes() == default_model()[WEIGHTS], "the scripted engine does not read them"
    hub.close()
    with ScriptedServing(tmp_path / "log2", NAME) as server:
        assert complete(server, NAME)
        assert server.said(f"{NAME} from the cache, commit {COMMIT}")
        until(lambda: server.said(f"(model {NAME}, commit {COMMIT}, cpu"), "the line that the server is ready")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_download_says_where_it_continues(
    hub: HubServer, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    hub.hold.clear()
    with subprocess.Popen([TANDEM, "serve", NAME], stderr=subprocess.PIPE, text=True) as server:
        cache = ModelCache(tmp_path / "home" / "hub", NAME)
        partial = cache.partial(digest_of(default_model()["tokenizer.json"]))
        until(lambda: partial.is_file() and partial.stat().st_size, "the first bytes")
        server.send_signal(sent)
        _, log = server.communicate(timeout=GUARD_SECONDS)
    assert server.returncode == code
    assert "Traceback" not in log
    assert f"kept in {cache.folder}" in log


@pytest.mark.parametrize("command", ["serve", "frontend", "doctor"])
def test_every_command_explains_a_name_that_the_hub_does_not_have(
    hub: HubServer, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process: the library has read the environment already.
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    endpoint = [] if command in ("serve", "doctor") else ["--endpoint", "ipc:///nowhere"]
    assert main([command, "org/other", *endpoint]) == (1 if command == "doctor" else 2)
    out, err = capsys.readouterr()
    text = out if command == "doctor" else err
    assert re.search(rf"\borg/other .*{re.escape(hub.url)}", text)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "config", "reason"),
    [
        (["serve"], {"architectures": ["DbrxForCausalLM"], "num_local_experts": 8}, "DbrxForCausalLM"),
        pytest.param(
            ["engine", "--endpoint", "ipc:///nowhere", "--check"],
            {"quantization_config": {"quant_method": "hqq"}},
            'quant_method "hqq"',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_model_that_is_not_supported_is_refused_before_its_weights_are_downloaded(
    hub: HubServer, command: list[str], config: dict[str, Any], reason: str
) -> None:
    files = hub.repositories[NAME].files
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | config).encode()
    done = subprocess.run([TANDEM, *command, "--model", NAME], capture_output=True, text=True, timeout=GUARD_SECONDS)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert len(hub.bodies("tokenizer.json")) == 1
    assert hub.bodies(WEIGHTS) == []


@pytest.mark.slow
def test_doctor_checks_a_model_without_its_weights(hub: HubServer) -> None:
    def doctor() -> dict[str, dict[str, str]]:
        ports = ("--port", "0", "--ops-port", "0")
        done = subprocess.run([TANDEM, "doctor", NAME, *ports, "--json"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        report: dict[str, dict[str, str]] = json.loads(done.stdout)["sections"]
        return report

    report = doctor()
    assert report["model"]["name"] == NAME
    assert report["model"]["commit"] == COMMIT
    assert report["model"]["download"].startswith("5 files, 11.2 MB")
    assert "GiB in float32" in report["model"]["weights"]
    assert "KV cache" in report["choices"]
    assert hub.bodies(WEIGHTS) == []
    program = f"from tandem import LLM\nwith LLM({NAME!r}) as llm: print(llm.generate('a', max_tokens=2)[0].text)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    later = doctor()
    assert later["model"]["download"] == "complete in the cache"
    # The free memory, which a reason of the KV cache names, is another each time.
    chosen, before = ({name: text.partition(" (")[0] for name, text in r["choices"].items()} for r in (later, report))
    assert chosen == before
    assert later["model"]["weights"] == report["model"]["weights"]


@pytest.mark.slow
def test_two_servers_at_once_and_a_frontend_elsewhere_share_one_download(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Serving(tmp_path / "a", NAME, wait=False) as first, Serving(tmp_path / "b", NAME) as second:
        until(first.ready, "the first server")
        assert complete(first, NAME) is not None
        assert complete(second, NAME) is not None
        assert len(hub.bodies(WEIGHTS)) == 1
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    hub.seen.clear()
    endpoint = f"ipc://{tmp_path}/none"
    with subprocess.Popen([TANDEM, "frontend", NAME, "--endpoint", endpoint, "--port", "0"]) as frontend:
        cache = tmp_path / "elsewhere"
        until(lambda: any(cache.rglob("config.json")), "the tokenizer and the configuration")
        frontend.send_signal(signal.SIGTERM)
    assert len(hub.bodies("tokenizer.json")) == 1
    assert hub.bodies(WEIGHTS) == []
