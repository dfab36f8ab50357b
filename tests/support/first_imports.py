"""Imports of the tests' modules before pytest collects them.

Every worker collects, and so imports, every module. In a fresh checkout, where none is compiled, all workers together
would compile the same one; since they begin at different places, each compiles its share and loads that of the others.
"""

from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest


def import_from_own_place(config: pytest.Config) -> None:
    """Import the modules that a worker of pytest-xdist will collect; what fails, fails again when it is collected."""
    worker: dict[str, str | int] = getattr(config, "workerinput", {})
    if not worker:
        return
    files = [file for given in config.args for file in _files(config.invocation_params.dir / given.partition("::")[0])]
    place = int(str(worker["workerid"]).removeprefix("gw")) * len(files) // int(worker["workercount"])
    for file in files[place:] + files[:place]:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
