"""The end-to-end tests with the lowest and with the newest direct dependencies that pyproject.toml allows.

Each has an environment of its own, which pip fills from the package index. Torch stays at one version.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.test_wheel import source, wheel

__all__ = ["source", "wheel"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("engine", "otel")
TORCH = "torch==2.13.*"
TOOLS = (
    *("anthropic", "hypothesis", "jsonschema", "openai", "psutil", "pytest", "pytest-timeout", "pytest-xdist"),
    *("pyyaml", "setuptools", "transformers"),
)
"""Packages of the extra `dev` that these tests import."""


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0]


def runtime() -> list[str]:
    """Return the direct dependencies of a server, without torch."""
    extras = PROJECT["optional-dependencies"]
    found = [*PROJECT["dependencies"], *(requirement for extra in EXTRAS for requirement in extras[extra])]
    return [requirement for requirement in found if name_of(requirement) != "torch"]


def lower_bound(requirement: str) -> str:
    bound = re.search(r">=([\d.]+)", requirement)
    assert bound is not None, f"{requirement} has no lower bound"
    return bound[1]


def run(*command: object, seconds: float) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.parametrize("bounds", ["lowest", "newest"])
def test_end_to_end_tests_pass(bounds: str, wheel: Path, tmp_path: Path) -> None:
    tools = [one for one in PROJECT["optional-dependencies"]["dev"] if name_of(one) in TOOLS]
    # The newest transformers needs more than the lowest tokenizers, so it is one of those that a bound holds for.
    bounded = [*runtime(), *(one for one in tools if name_of(one) == "transformers")]
    wanted = [TORCH]
    if bounds == "lowest":
        wanted += [f"{name_of(one)}=={lower_bound(one)}" for one in bounded]
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("\n".join(wanted) + "\n")
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment, seconds=120)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--upgrade", "pip", seconds=300)
    package = f"{wheel}[{','.join(EXTRAS)}]"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, package, *tools, seconds=1200)
    run(python, "-m", "pip", "check", seconds=120)
    if bounds == "lowest":
        listed = json.loads(run(python, "-m", "pip", "list", "--format", "json", seconds=120))
        versions = {package["name"].lower().replace("_", "-"): package["version"] for package in listed}
        for one in bounded:
            found = versions[name_of(one).lower().replace("_", "-")]
            assert found == lower_bound(one) or found.startswith(lower_bound(one) + "."), one
    run(python, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "tests/e2e", seconds=2400)
