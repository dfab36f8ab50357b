"""Save benchmark results with their commit, machine and versions."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"
PACKAGES = ("torch", "triton", "flashinfer-python", "pyzmq", "msgspec", "numpy", "transformers", "tokenizers")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def origin() -> dict[str, Any]:
    """Return the git hash, machine and package versions.

    The hash of a dirty tree ends in "+". GIT_HASH in the environment overrides it, for copies without a repository.
    """
    git = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return {
        "git": os.environ.get("GIT_HASH") or git.stdout.strip(),
        "python": sys.version.split()[0],
        "machine": {"processor": _processor(), "system": platform.platform()},
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
    }


def save(name: str, config: dict[str, Any], figures: Any) -> Path:
    """Write `benchmarks/results/NAME.json` and return its path, like `write`."""
    return write(RESULTS / f"{name}.json", config, figures)


def write(path: Path, config: dict[str, Any], figures: Any) -> Path:
    """Write a result file and return its path.

    If the file cannot be written, print its content and exit, since a measurement may have taken hours.
    """
    text = json.dumps({"origin": origin(), "config": config, "figures": figures}, indent=1)
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    except OSError as error:
        print(text)
        sys.exit(f"{path} cannot be written ({error.strerror}); its text is printed above")
    return path
