"""A `tandem` package for child processes whose engine core is a program of the test's."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTED = "from tests.fakes.scripted_engine import main; main()"
"""Program of an engine core whose model is a script (`tests.fakes.scripted_engine`)."""


def write_tandem(folder: Path, program: str, frontend: str | None = None, tree: Path = ROOT) -> str:
    """Write the package into a folder; return the PYTHONPATH that finds it first, and the tests behind it.

    The frontend and the protocol are links to the real ones of a tree. `python -m tandem.engine_core` runs `program`,
    and `python -m tandem.frontend` a program of its own if one is given. A program that is SCRIPTED finds the other
    modules of the engine core.
    """
    package = folder / "tandem"
    engine = package / "engine_core"
    engine.mkdir(parents=True, exist_ok=True)
    if program == SCRIPTED:
        _link_parts(tree / "engine_core", engine)
    if frontend is not None:
        (package / "frontend").mkdir(exist_ok=True)
        _link_parts(tree / "frontend", package / "frontend")
        (package / "frontend" / "__main__.py").write_text(frontend)
    for part in ("frontend", "protocol"):
        if not (package / part).exists():
            (package / part).symlink_to(tree / part)
    (package / "__init__.py").write_text((tree / "src" / "tandem" / "__init__.py").read_text())
    (engine / "__init__.py").touch()
    (engine / "__main__.py").write_text(program)
    # Python takes the code of a program of this size and second for this one's.
    for cached in (engine / "__pycache__").glob("__main__.*"):
        cached.unlink(missing_ok=True)
    return f"{folder}:{ROOT}"


def _link_parts(source: Path, package: Path) -> None:
    """Link every part of a package but its program and what is there already."""
    for part in source.iterdir():
        if part.name != "__main__.py" and not (package / part.name).exists():
            (package / part.name).symlink_to(part)
