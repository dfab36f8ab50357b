"""The wheel and the sdist, installed outside the tree, serve; also from a folder that shadows modules."""

import shutil
import site
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.serving import Serving

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "engine_core", "frontend", "protocol", "pyproject.toml", "README.md", "LICENSE")
SHADOWS = ("random.py", "json.py", "typing.py", "frontend/__init__.py", "protocol/__init__.py", "tandem.py")
"""Files of a careless working folder: each breaks a process that looks there for its imports."""


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what a build needs, so that nothing is left in the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, folder], cwd=source, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.tar.gz")
    return built


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"tandem", "tandem_llm"}
    for needed in (
        "tandem/py.typed",
        "tandem/engine_core/default_model/model.safetensors",
        "tandem/engine_core/kernels/tiles/devices/nvidia-h200.json",
        "tandem/frontend/page/index.html",
        "tandem/frontend/page/vendor/marked/marked.esm.js",
        "tandem/frontend/page/vendor/marked/LICENSE",
        "tandem/frontend/templates/llama3.jinja",
    ):
        assert needed in names
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "engine_core/default_model/LICENSE", "frontend/page/vendor/marked/LICENSE"}


def test_the_wheel_serves_from_a_folder_that_shadows_modules(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, folder = tmp_path / "environment", tmp_path / "folder"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    run(sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "-q", "--no-deps", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Dependencies come from the environment of the tests; its link to the tree is a .pth file, not followed here.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    for name in SHADOWS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise ImportError('a module of the working folder was imported')\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Serving(tmp_path / "log", tandem=environment / "bin" / "tandem") as serving:
        status, reply = serving.post(
            "/v1/completions", {"model": "tandem-default", "prompt": "What does textwrap.dedent do?", "max_tokens": 8}
        )
        assert status == 200, reply
        assert reply["usage"]["completion_tokens"] == 8
        # A constrained request starts a process more, which compiles the expression.
        body = {"model": "tandem-default", "prompt": "a", "max_tokens": 8, "regex": "[ab]"}
        status, reply = serving.post("/v1/completions", body)
        assert (status, reply["choices"][0]["text"] in ("a", "b")) == (200, True), reply


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_sdist_and_wheel_serve_in_an_empty_environment(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: Path = request.getfixturevalue(kind)
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"torch=={version('torch').partition('+')[0]}\n")
    install = (environment / "bin" / "python", "-m", "pip", "install", "-q", "-c", constraints, f"{built}[engine]")
    done = subprocess.run(list(map(str, install)), capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Serving(tmp_path / "log", tandem=environment / "bin" / "tandem") as serving:
        body = {"model": "tandem-default", "prompt": "What does textwrap.dedent do?", "max_tokens": 8}
        status, reply = serving.post("/v1/completions", body)
        assert (status, reply["usage"]["completion_tokens"]) == (200, 8), reply
