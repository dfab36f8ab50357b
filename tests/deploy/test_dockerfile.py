"""The Dockerfile: its lines checked by hadolint, and run in a plain folder by an unprivileged user."""

import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.plain_image import DOCKERFILE, ROOT, PlainImage, lineage, stages
from tests.support.serving import GUARD_SECONDS, free_port, until

TARGETS = ("frontend", "engine")
DEFAULT_MODEL = ROOT / "engine_core" / "default_model"


def test_hadolint_says_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_bases_are_pinned_to_a_release() -> None:
    known = stages()
    for stage in known.values():
        assert stage.base in known or re.search(r":\d+\.\d+\.\d+-", stage.base), stage.base


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_unprivileged_and_reports_its_health(target: str) -> None:
    stage = stages()[target]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", stage.last("USER"))
    assert "http://127.0.0.1:8100/health" in stage.argv("HEALTHCHECK")[-1]
    assert stage.instructions[-1][0] == "CMD"


@pytest.mark.parametrize("target", TARGETS)
def test_the_context_holds_what_the_wheel_needs_and_nothing_else(target: str) -> None:
    copied = [text for stage in lineage(target) for word, text in stage.instructions if word in ("COPY", "ADD")]
    assert all(text == ". ." or text.startswith("--from=") for text in copied)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*", "everything is left out that no line brings back"
    brought = {line.removeprefix("!") for line in lines if line.startswith("!")}
    wanted = {"src", "engine_core", "frontend", "protocol", "pyproject.toml", "README.md", "LICENSE"}
    assert brought == wanted | {"deploy/docker/constraints.txt"}


def test_only_the_engine_has_torch() -> None:
    installed = {
        target: [
            re.findall(r"(\S+)$", text)[0]
            for stage in lineage(target)
            for word, text in stage.instructions
            if word == "RUN" and "pip install" in text
        ]
        for target in TARGETS
    }
    assert installed == {"frontend": ["."], "engine": ["'.[cuda]'"]}


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a path short enough for a socket, in which another user may work."""
    path = Path(tempfile.mkdtemp(prefix="tdm-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def answer(port: int) -> str:
    body = {"model": "tandem-default", "prompt": "What does textwrap.dedent do?", "max_tokens": 32, "temperature": 0}
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=GUARD_SECONDS)
    text: str = reply.json()["choices"][0]["text"]
    return text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_images_build_and_serve_in_a_plain_folder_as_another_user(root: Path, tmp_path: Path) -> None:
    """The frontend gets its packages from the index, the engine those of this environment in place of CUDA's."""
    images = {target: PlainImage(root / target, target) for target in TARGETS}
    for target, image in images.items():
        image.root.mkdir()
        image.build(**({"PIP_NO_DEPS": "1"} if target == "engine" else {}))
    frontend, engine = images["frontend"], images["engine"]
    (packages,) = engine.root.glob("opt/tandem/lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    assert "torch" not in frontend.run(["python3", "-m", "pip", "list"])
    assert '"alice"' in frontend.run(["tandem", "api-key", "alice"])
    frontend.run(["tandem", "keys", frontend.there("/var/lib/tandem/keys")])
    shutil.copytree(DEFAULT_MODEL, frontend.root / "models")
    endpoint = frontend.there("ipc:///run/tandem/sockets/engine")
    ports = {name: free_port() for name in ("serve", "serve_ops", "engine_ops", "frontend", "frontend_ops")}

    def changes(name: str) -> list[tuple[str, str]]:
        loopback = [("0.0.0.0", "127.0.0.1"), ("8100", str(ports[f"{name}_ops"])), ("5", "0")]
        return [*loopback, ("serve" if name == "serve" else "frontend", name)]

    def argv(image: PlainImage, name: str) -> list[str]:
        return [*image.command(changes(name)), "--port", str(ports[name]), "--frontends", "1"]

    engine_argv = ["tandem", "engine", "--endpoint", endpoint, "--ops-port", str(ports["engine_ops"])]
    running = []
    try:
        running.append(engine.start(argv(engine, "serve"), tmp_path / "serve.log"))
        until(lambda: engine.is_healthy(ports["serve_ops"]), "health of `serve`")
        assert "common leading whitespace" in answer(ports["serve"])
        assert (engine.root / "var/lib/tandem/state/store.sqlite3").exists()
        running[0].terminate()
        assert running.pop().wait(GUARD_SECONDS) == 0
        running.append(engine.start(engine_argv, tmp_path / "engine.log", frontend.there("/run/tandem")))
        running.append(frontend.start(argv(frontend, "frontend"), tmp_path / "frontend.log"))
        until(lambda: frontend.is_healthy(ports["frontend_ops"]), "health of `frontend`")
        assert "common leading whitespace" in answer(ports["frontend"])
    finally:
        for process in running:
            process.terminate()
            process.wait(GUARD_SECONDS)
        for log in tmp_path.glob("*.log"):
            print(log.name, log.read_text())
