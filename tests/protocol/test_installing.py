"""Commands that install missing packages."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tandem.protocol import installing
from tandem.protocol.installing import install_extra, install_packages

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("extra", ["engine", "bench", "otel"])
def test_command_names_the_packages_of_an_extra(extra: str) -> None:
    python, *words = shlex.split(install_extra(extra))
    assert (python, words[:3]) == (sys.executable, ["-m", "pip", "install"])
    assert names(words[3:]) == names(EXTRAS[extra])


def test_command_names_the_packages_of_extras_that_an_extra_names() -> None:
    words = shlex.split(install_extra("cuda"))[4:]
    assert names(words) == names(EXTRAS["engine"]) | names(EXTRAS["cuda"]) - {"tandem-llm"}


def test_command_runs_as_it_is_printed() -> None:
    shell = f"{install_extra('bench')} --no-index --dry-run --quiet --disable-pip-version-check"
    found = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_source_tree_that_was_never_installed_has_the_command_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> list[str]:
        raise PackageNotFoundError

    monkeypatch.setattr(installing, "requires", missing)
    assert shlex.split(install_extra("otel"))[3:] == ["install", "-e", ".[otel]"]


def test_environment_without_pip_is_filled_by_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(installing.shutil, "which", lambda _: "/usr/bin/uv")
    assert install_packages("a>=1") == f"uv pip install --python {sys.executable} 'a>=1'"
    monkeypatch.setattr(installing.shutil, "which", lambda _: None)
    assert install_packages("a") == f"{sys.executable} -m pip install a"


def test_python_of_a_folder_with_a_blank_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my env/bin/python")
    assert install_packages("a").startswith("'/my env/bin/python' -m pip")


def test_no_other_module_writes_such_a_command() -> None:
    folders = ("protocol", "frontend", "engine_core", "benchmarks")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    writing = [path for path in sources if re.search(r"pip install [\w'.{-]|tandem-llm\[", path.read_text())]
    assert writing == [ROOT / "protocol" / "installing.py"]
